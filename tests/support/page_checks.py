"""Checks of what a user of the page can perceive and reach. Not a test itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from browser import Browser

CONTROLS = frozenset({"button", "textbox", "combobox", "spinbutton", "tab", "tabpanel", "checkbox", "link", "image"})
"""Roles that need an accessible name."""

CONTRAST = """
const alphaOf = (colour) => Number(colour.match(/[\\d.]+/g)[3] ?? 1);
const channels = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
const luminance = (colour) => {
  const [r, g, b] = channels(colour).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => {
  const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (light + 0.05) / (dark + 0.05);
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (alphaOf(colour) === 1) return colour;
    if (alphaOf(colour) > 0) throw new Error('translucent ground: ' + at.outerHTML.slice(0, 80));
  }
  throw new Error('no ground');
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const isShown = element.checkVisibility() && !element.closest('.hidden, :disabled, title, noscript');
  if (!walker.currentNode.data.trim() || !isShown) continue;
  const style = getComputedStyle(element);
  const rect = element.closest('svg') && element.parentElement.querySelector('rect');
  const [front, back] = rect ? [style.fill, getComputedStyle(rect).fill] : [style.color, ground(element)];
  found.push([ratio(front, back), front, back, walker.currentNode.data.trim().slice(0, 30)]);
}
for (const input of document.querySelectorAll('input, textarea')) {
  if (!input.checkVisibility() || !input.placeholder) continue;
  const front = getComputedStyle(input, '::placeholder').color;
  found.push([ratio(front, ground(input)), front, ground(input), input.placeholder]);
}
return found;
"""

UNLABELLED = """
const hasLabel = (control) => [...control.labels].some((label) => label.textContent.trim()) || control.ariaLabel;
return [...document.querySelectorAll('input, select, textarea')].filter((e) => !hasLabel(e)).map((e) => e.outerHTML);
"""

FOCUSED = """
const element = document.activeElement, style = getComputedStyle(element), box = element.getBoundingClientRect();
const outline = style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth);
const at = document.elementFromPoint(box.x + Math.min(box.width / 2, 20), box.y + Math.min(box.height / 2, 12));
return {name: element.id || element.className || element.tagName, outline,
        isVisible: Boolean(at && (element.contains(at) || at.contains(element)))};
"""


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of the Tab key.

    Attributes:
        name: id of the element, else its class or tag.
        outline: width of the focus outline in pixels.
        is_visible: whether the element is in view and not covered.
    """

    name: str
    outline: float
    is_visible: bool


def low_contrasts(browser: Browser, *, least: float = 4.5) -> list[str]:
    """Return the visible texts whose contrast with their ground is too low; there must be texts at all."""
    found = browser.run(CONTRAST)
    assert len(found) > 10
    return [f"{ratio:.2f} {front} on {back}: {text}" for ratio, front, back, text in found if ratio < least]


def unnamed(browser: Browser) -> list[str]:
    """Return controls and images without an accessible name, and fields without a label: a placeholder is none."""
    nodes = browser.devtools("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"] and _value(node, "role") in CONTROLS]
    assert len(shown) > 5
    nameless = [str(node) for node in shown if not _value(node, "name").strip()]
    return nameless + browser.run(UNLABELLED)


def _value(node: dict[str, Any], field: str) -> str:
    return str(node.get(field, {}).get("value", ""))


def tab_stops(browser: Browser, *, most: int = 60) -> list[Stop]:
    """Return the stops of the Tab key from the beginning of the page until focus leaves it."""
    browser.run("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    stops: list[Stop] = []
    for _ in range(most):
        browser.press("Tab")
        if browser.run("return document.activeElement === document.body"):
            return stops
        found = browser.run(FOCUSED)
        stop = Stop(found["name"], found["outline"], found["isVisible"])
        if stops and stop.name == stops[0].name:
            return stops
        stops.append(stop)
    raise AssertionError(f"focus does not leave the page: {[stop.name for stop in stops]}")
