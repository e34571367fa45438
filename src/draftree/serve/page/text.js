/** A streamed text: one or more elements per piece, marked by origin, with a current piece for pointer and keyboard. */

import { button, copyText, el } from "./dom.js";
import { parseMarkdown } from "./markdown.js";

export const ORIGINS = ["drafted", "target", "plain"];

/** Elements in which the newest text of an open block is appended. */
const LEAVES = "p, h3, h4, h5, h6, th, td, pre > code";
/** An open block is formatted again whenever it has grown by this share of its length. */
const GROWTH = 1 / 8;
/** Characters up to which it is formatted again for every piece. */
const SHORT = 500;

/**
 * View of one text. The container has one tab stop; arrow keys move the current piece.
 *
 * Markdown is formatted block by block: finished blocks stay, and a long open block is formatted again only after it
 * has grown by a share of its length, so the work is proportional to the length of the text. Between two formattings
 * pieces are appended as they are.
 */
export class TextView {
  /** @type {{start: number, origin: string, round: import("./rounds.js").Round | null}[]} */
  #pieces = [];
  #source = "";
  #current = -1;
  #hovered = false;
  /** @type {import("./rounds.js").Round | null} */
  #marked = null;
  #openStart = 0; // of the source that is not in finished blocks
  #formattedEnd = 0;
  /** @type {HTMLElement[]} */
  #open = [];
  /** @type {HTMLElement} gets pieces as they are */
  #tail;

  /**
   * @param {string} label accessible name
   * @param {(round: import("./rounds.js").Round | null, isByKey: boolean) => void} onInspect gets the round of
   *     the current piece
   * @param {boolean} [isMarkdown] whether the text is formatted; otherwise it is shown as written
   */
  constructor(label, onInspect, isMarkdown = false) {
    this.onInspect = onInspect;
    this.isMarkdown = isMarkdown;
    this.element = el("div", { class: "text", tabindex: 0, role: "group", "aria-label": label });
    this.#tail = this.element;
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
    const start = this.#source.length;
    this.#pieces.push({ start, origin: piece.origin, round });
    this.#source += piece.text;
    const grown = this.#source.length - this.#formattedEnd;
    const isDue = grown > Math.max(0, this.#source.length - this.#openStart - SHORT) * GROWTH;
    if (this.isMarkdown && (isDue || !this.#open.length)) this.#format();
    else this.#tail.append(...this.#spans(start, this.#source.length));
  }

  /** Formats what was appended as it is. */
  finish() {
    if (this.isMarkdown && this.#formattedEnd < this.#source.length) this.#format();
  }

  /** @returns {string} the text as written */
  get source() {
    return this.#source;
  }

  /** @param {boolean} isMarkdown shows the whole text formatted or as written */
  show(isMarkdown) {
    this.isMarkdown = isMarkdown;
    this.element.replaceChildren();
    this.#open = [];
    this.#openStart = this.#formattedEnd = 0;
    this.#tail = this.element;
    if (isMarkdown) this.#format();
    else this.element.append(...this.#spans(0, this.#source.length));
  }

  /** Formats the open blocks again. All but those that can still change are finished then. */
  #format() {
    const blocks = parseMarkdown(this.#source, this.#openStart);
    const elements = blocks.map((block) => this.#build(block.tree));
    for (const element of this.#open) element.remove();
    this.element.append(...elements);
    const isSettled = (block) => this.#source.indexOf("\n", block.start) >= 0;
    const first = Math.max(0, blocks.findLastIndex(isSettled));
    this.#open = elements.slice(first);
    this.#openStart = blocks[first]?.start ?? this.#source.lastIndexOf("\n") + 1;
    this.#formattedEnd = this.#source.length;
    const last = this.#open.at(-1) ?? this.element;
    this.#tail = [...last.querySelectorAll(LEAVES)].at(-1) ?? last;
  }

  /** @param {import("./markdown.js").Tree} tree @returns {HTMLElement} */
  #build(tree) {
    const { tag, attributes, children } = tree;
    const nodes = children.flatMap((child) =>
      "tag" in child ? [this.#build(child)] : this.#spans(child.start, child.end),
    );
    const element = el(tag, attributes, ...nodes);
    if (tag === "pre") return codeBlock(element);
    return tag === "table" ? el("div", { class: "scroll" }, element) : element;
  }

  /** @returns {HTMLElement[]} the pieces of a range of the source */
  #spans(start, end) {
    const spans = [];
    for (let index = this.#pieceAt(start); this.#pieces[index]?.start < end; index++) {
      const { start: from, origin, round } = this.#pieces[index];
      const to = this.#pieces[index + 1]?.start ?? this.#source.length;
      const text = this.#source.slice(Math.max(start, from), Math.min(end, to));
      if (text === "") continue;
      const span = el("span", { class: `piece ${origin}`, "data-piece": index }, text);
      span.classList.toggle("in-round", round !== null && round === this.#marked);
      span.classList.toggle("current", index === this.#current);
      spans.push(span);
    }
    return spans;
  }

  /** @returns {number} the last piece that begins at or before a place of the source */
  #pieceAt(place) {
    let [low, high] = [0, this.#pieces.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.#pieces[middle].start <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** @param {number} index @returns {NodeListOf<HTMLElement>} elements of a piece: none if it is Markdown's syntax */
  #spansOf(index) {
    return this.element.querySelectorAll(`[data-piece="${index}"]`);
  }

  /**
   * Marks the pieces of a round.
   *
   * @param {import("./rounds.js").Round | null} round null for none
   */
  mark(round) {
    this.#marked = round;
    for (const span of this.element.querySelectorAll(".piece")) {
      const own = this.#pieces[span.dataset.piece].round;
      span.classList.toggle("in-round", own !== null && own === round);
    }
  }

  /** @param {PointerEvent | MouseEvent} event */
  #point(event) {
    const index = event.target instanceof HTMLElement ? event.target.dataset.piece : undefined;
    if (index === undefined) return;
    this.#hovered = true;
    this.#go(Number(index), false);
  }

  #focus() {
    if (this.#pieces.length && !this.#hovered) this.#go(this.#shownAt(Math.max(this.#current, 0), 1), true);
    this.#hovered = false;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.#pieces.length) return;
    const target = this.#targetOf(event.key);
    if (target === null) return;
    event.preventDefault();
    this.#go(this.#shownAt(target, target < this.#current ? -1 : 1), true);
    this.#spansOf(this.#current)[0]?.scrollIntoView({ block: "nearest" });
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
   * @param {number} index of a piece
   * @param {1 | -1} step
   * @returns {number} the nearest piece that is shown, first in the direction of the step; Markdown's syntax is not
   */
  #shownAt(index, step) {
    const start = Math.min(Math.max(index, 0), this.#pieces.length - 1);
    for (const direction of [step, -step]) {
      for (let at = start; this.#pieces[at]; at += direction) if (this.#spansOf(at).length) return at;
    }
    return start;
  }

  /**
   * @param {number} index
   * @param {boolean} isByKey
   */
  #go(index, isByKey) {
    for (const span of this.#spansOf(this.#current)) span.classList.remove("current");
    this.#current = index;
    const { round } = this.#pieces[index];
    for (const span of this.#spansOf(index)) span.classList.add("current");
    this.mark(round);
    this.onInspect(round, isByKey);
  }
}

/**
 * @param {() => string} text
 * @returns {HTMLButtonElement} a button that copies the text
 */
export function copyButton(text, label = "Copy") {
  const copy = button(label, async () => {
    copy.textContent = (await copyText(text())) ? "Copied" : "Not allowed here";
  });
  return copy;
}

/** @param {HTMLElement} pre @returns {HTMLElement} the block with its language and a button that copies the code */
function codeBlock(pre) {
  const head = el("div", { class: "code-head" }, el("span", {}, pre.dataset.language || "code"));
  head.append(copyButton(() => pre.textContent));
  return el("div", { class: "code" }, head, pre);
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
