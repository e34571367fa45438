/** A streamed text: one element per piece, marked by origin, with a current piece for pointer and keyboard. */

import { el } from "./dom.js";

export const ORIGINS = ["drafted", "target", "plain"];

/** View of one text. The container has one tab stop; arrow keys move the current piece. */
export class TextView {
  /** @type {{span: HTMLElement, round: import("./rounds.js").Round | null}[]} */
  #pieces = [];
  #current = -1;
  #hovered = false;

  /**
   * @param {string} label accessible name
   * @param {(round: import("./rounds.js").Round | null, isByKey: boolean) => void} onInspect gets the round of
   *     the current piece
   */
  constructor(label, onInspect) {
    this.onInspect = onInspect;
    this.element = el("div", { class: "text", tabindex: 0, role: "group", "aria-label": label });
    this.element.setAttribute("aria-description", "Arrow keys move through the pieces and show the round of each.");
    this.element.addEventListener("pointerover", (event) => this.#point(event));
    this.element.addEventListener("click", (event) => this.#point(event));
    this.element.addEventListener("focus", () => this.#focus());
    this.element.addEventListener("keydown", (event) => this.#key(event));
  }

  /**
   * @param {import("./rounds.js").Piece} piece
   * @param {import("./rounds.js").Round | null} round
   */
  add(piece, round) {
    const span = el("span", { class: `piece ${piece.origin}`, "data-piece": this.#pieces.length }, piece.text);
    this.#pieces.push({ span, round });
    this.element.append(span);
  }

  /** @returns {number} number of pieces */
  get length() {
    return this.#pieces.length;
  }

  /**
   * Marks the pieces of a round.
   *
   * @param {import("./rounds.js").Round | null} round null for none
   */
  mark(round) {
    for (const { span } of this.#pieces.filter((piece) => piece.span.classList.contains("in-round"))) {
      span.classList.remove("in-round");
    }
    if (!round) return;
    for (const { span } of this.#pieces.filter((piece) => piece.round === round)) span.classList.add("in-round");
  }

  /** @param {PointerEvent | MouseEvent} event */
  #point(event) {
    const index = event.target instanceof HTMLElement ? event.target.dataset.piece : undefined;
    if (index === undefined) return;
    this.#hovered = true;
    this.#go(Number(index), false);
  }

  #focus() {
    if (this.#pieces.length && !this.#hovered) this.#go(this.#current < 0 ? 0 : this.#current, true);
    this.#hovered = false;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.#pieces.length) return;
    const target = this.#targetOf(event.key);
    if (target === null) return;
    event.preventDefault();
    this.#go(Math.min(Math.max(target, 0), this.#pieces.length - 1), true);
    this.#pieces[this.#current].span.scrollIntoView({ block: "nearest" });
  }

  /**
   * @param {string} key
   * @returns {number | null} the piece to which a key moves
   */
  #targetOf(key) {
    const at = this.#current;
    if (key === "ArrowRight") return at + 1;
    if (key === "ArrowLeft") return at - 1;
    if (key === "Home") return 0;
    if (key === "End") return this.#pieces.length - 1;
    if (key === "ArrowDown") return this.#neighbour(1);
    if (key === "ArrowUp") return this.#neighbour(-1);
    return null;
  }

  /**
   * @param {1 | -1} step
   * @returns {number} the nearest piece of another round
   */
  #neighbour(step) {
    const here = this.#pieces[this.#current]?.round;
    let at = this.#current + step;
    while (this.#pieces[at] && this.#pieces[at].round === here) at += step;
    return at;
  }

  /**
   * @param {number} index
   * @param {boolean} isByKey
   */
  #go(index, isByKey) {
    this.#pieces[this.#current]?.span.classList.remove("current");
    this.#current = index;
    const { span, round } = this.#pieces[index];
    span.classList.add("current");
    this.mark(round);
    this.onInspect(round, isByKey);
  }
}

/**
 * @param {Record<string, number>} counts pieces by origin
 * @returns {HTMLElement} legend of the marks, with counts
 */
export function legend(counts) {
  const words = { drafted: "drafted and accepted", target: "target token", plain: "plain decoding" };
  const shown = ORIGINS.filter((origin) => origin !== "plain" || counts.plain);
  const items = shown.map((origin) =>
    el(
      "li",
      {},
      el("span", { class: `piece ${origin}` }, "token"),
      el("span", {}, ` ${words[origin]}: `),
      el("strong", {}, String(counts[origin] ?? 0)),
    ),
  );
  return el("ul", { class: "legend", "aria-label": "Origin of the pieces" }, ...items);
}
