/** Tabs with one tab stop: arrow keys, Home and End change the mode. */

/**
 * @param {HTMLElement[]} tabs elements with role "tab" and `data-mode`
 * @param {(mode: string) => void} onSelect
 * @returns {(mode: string) => void} selects a mode without calling onSelect
 */
export function setUpTabs(tabs, onSelect) {
  const select = (mode) => {
    for (const tab of tabs) {
      const isSelected = tab.dataset.mode === mode;
      tab.setAttribute("aria-selected", String(isSelected));
      tab.tabIndex = isSelected ? 0 : -1;
    }
  };
  const go = (index) => {
    const tab = tabs[(index + tabs.length) % tabs.length];
    tab.focus();
    onSelect(tab.dataset.mode);
  };
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => onSelect(tab.dataset.mode));
    tab.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      go(moves[event.key]);
    });
  }
  return select;
}
