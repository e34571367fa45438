/** Markdown as a tree of elements. Texts are ranges of the source, so that the pieces of a text keep their marks. */

/**
 * @typedef {{start: number, end: number}} Range of the source; a line has no line break
 * @typedef {{tag: string, attributes?: Record<string, string>, children: (Tree | Range)[]}} Tree
 * @typedef {{tree: Tree, start: number}} Block with the start of its first line
 */

/** Levels of lists and quotes; deeper ones are paragraphs. Every level reads its lines again. */
const MAX_DEPTH = 8;
const FENCE = /^(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6})[ \t]+/;
const RULE = /^([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const FIRST_ITEM = /^(?:[-*+]|1[.)])[ \t]+\S/;
const QUOTE = /^> ?/;
const DELIMITER = /^:?-+:?$/;
const SPECIAL = /[\\`*_~[]|!\[|https?:/g;
const ADDRESS = /[^()\s]{1,2000}(?:\([^()\s]{0,500}\)[^()\s]{0,500})?/.source;
const LINK = new RegExp(`!?\\[([^[\\]\\n]{0,500})\\]\\((${ADDRESS})(?:[ \\t]+"[^"\\n]{0,500}")?\\)`, "y");
const BARE = /https?:\/\/[^\s<>"`*|]{1,2000}/y;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

/**
 * @param {string} text
 * @returns {string | null} the address of a link; null for schemes that a browser may run, and for relative addresses
 */
export function safeUrl(text) {
  if (!URL.canParse(text)) return null;
  const url = new URL(text);
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

/**
 * @param {string} source
 * @param {number} [from]
 * @returns {Block[]} what is written after `from`. Blocks before one whose first line is complete do not change if the
 *     source grows.
 */
export function parseMarkdown(source, from = 0) {
  const lines = [];
  for (let start = from; start < source.length; start = lines.at(-1).end + 1) {
    const end = source.indexOf("\n", start);
    lines.push({ start, end: end < 0 ? source.length : end });
  }
  return new Blocks(source, lines, 0).all();
}

/** The blocks of some lines. Every rule returns a tree and moves to the line after it, or returns null. */
class Blocks {
  #at = 0;

  /**
   * @param {string} source
   * @param {Range[]} lines
   * @param {number} depth
   */
  constructor(source, lines, depth) {
    this.source = source;
    this.lines = lines;
    this.depth = depth;
  }

  /** @returns {Block[]} */
  all() {
    const blocks = [];
    while (this.#at < this.lines.length) {
      const { start } = this.lines[this.#at];
      if (this.#text() === "") this.#at += 1;
      else blocks.push({ start, tree: this.#block() });
    }
    return blocks;
  }

  /** @returns {Tree} */
  #block() {
    if (this.depth >= MAX_DEPTH) return this.#paragraph();
    return (
      this.#fence() ?? this.#heading() ?? this.#rule() ?? this.#quote() ?? this.#list() ?? this.#table() ??
      this.#paragraph()
    );
  }

  /** @returns {string} a line without the spaces around it; "" after the last one */
  #text(at = this.#at) {
    const line = this.lines[at];
    return line ? this.source.slice(line.start, line.end).trim() : "";
  }

  /** @returns {number} columns before the text of a line; a tab counts as four */
  #indent(at = this.#at) {
    const { start, end } = this.lines[at];
    const [spaces] = /^[ \t]*/.exec(this.source.slice(start, end));
    return spaces.replaceAll("\t", "    ").length;
  }

  /** @returns {Range} a line without up to so many columns of spaces */
  #strip(at, columns) {
    let { start, end } = this.lines[at];
    for (let column = 0; column < columns && start < end; start++) {
      if (this.source[start] === " ") column += 1;
      else if (this.source[start] === "\t") column += 4;
      else break;
    }
    return { start, end };
  }

  /** @param {RegExp} prefix matched by the text @returns {Range} the line after the prefix */
  #after(prefix, at = this.#at) {
    const { start, end } = this.#strip(at, Infinity);
    return { start: start + prefix.exec(this.source.slice(start, end))[0].length, end };
  }

  /** @param {Range[]} lines */
  #inner(lines) {
    return new Blocks(this.source, lines, this.depth + 1).all().map((block) => block.tree);
  }

  #fence() {
    const opening = FENCE.exec(this.#text());
    if (!opening) return null;
    const [, marks, info] = opening;
    const isEnd = (text) => text.startsWith(marks) && text === marks[0].repeat(text.length);
    const indent = this.#indent();
    const first = ++this.#at;
    while (this.#at < this.lines.length && !isEnd(this.#text())) this.#at += 1;
    const code = [];
    for (let at = first; at < this.#at; at++) {
      const { start, end } = this.#strip(at, indent);
      code.push({ start, end: at + 1 < this.#at ? end + 1 : end });
    }
    this.#at += 1;
    const [language] = info.trim().split(/\s/);
    const attributes = { "data-language": language.slice(0, 40) };
    return { tag: "pre", attributes, children: [{ tag: "code", children: code }] };
  }

  #heading() {
    const found = HEADING.exec(this.#text());
    if (!found) return null;
    const children = inline(this.source, [this.#after(HEADING)]);
    this.#at += 1;
    return { tag: `h${Math.min(found[1].length + 2, 6)}`, children };
  }

  #rule() {
    if (!RULE.test(this.#text())) return null;
    this.#at += 1;
    return { tag: "hr", children: [] };
  }

  #quote() {
    if (!QUOTE.test(this.#text())) return null;
    const lines = [];
    for (; QUOTE.test(this.#text()); this.#at++) lines.push(this.#after(QUOTE));
    return { tag: "blockquote", children: this.#inner(lines) };
  }

  #list() {
    const found = ITEM.exec(this.#text());
    if (!found) return null;
    const isOrdered = /\d/.test(found[1]);
    const lead = this.#indent();
    const isItem = () => {
      const marker = ITEM.exec(this.#text());
      return marker && /\d/.test(marker[1]) === isOrdered && this.#indent() < lead + 2;
    };
    const items = [];
    let end = this.#at;
    while (this.#at < this.lines.length && isItem()) {
      items.push({ tag: "li", children: this.#item(lead) });
      end = this.#at;
      while (this.#at < this.lines.length && this.#text() === "") this.#at += 1;
    }
    this.#at = end;
    const attributes = isOrdered ? { start: String(parseInt(found[1], 10)) } : {};
    return { tag: isOrdered ? "ol" : "ul", attributes, children: items };
  }

  /** @param {number} lead columns before the markers of the list */
  #item(lead) {
    const columns = lead + ITEM.exec(this.#text())[0].length;
    const lines = [this.#after(ITEM)];
    let isAfterBlank = false;
    let end = ++this.#at;
    for (; this.#at < this.lines.length; this.#at++) {
      const isBlank = this.#text() === "";
      const isInside = isBlank || this.#indent() >= lead + 2;
      if (!isInside && (isAfterBlank || ITEM.test(this.#text()) || this.#startsBlock())) break;
      lines.push(this.#strip(this.#at, columns));
      if (!isBlank) end = this.#at + 1;
      isAfterBlank = isBlank;
    }
    this.#at = end;
    return this.#inner(lines);
  }

  #table() {
    if (!this.#startsTable()) return null;
    const cells = (tag) =>
      this.#cells().map((range, i) => ({ tag, attributes: align[i], children: inline(this.source, [range]) }));
    const align = this.#cells(this.#at + 1).map(({ start, end }) => {
      const dashes = this.source.slice(start, end);
      return dashes.endsWith(":") ? { class: dashes.startsWith(":") ? "center" : "right" } : {};
    });
    const head = { tag: "thead", children: [{ tag: "tr", children: cells("th") }] };
    const rows = [];
    for (this.#at += 2; this.#text().includes("|"); this.#at++) rows.push({ tag: "tr", children: cells("td") });
    return { tag: "table", children: [head, { tag: "tbody", children: rows }] };
  }

  #startsTable() {
    if (!this.#text().includes("|") || !this.#text(this.#at + 1).includes("-")) return false;
    const under = this.#cells(this.#at + 1).map(({ start, end }) => this.source.slice(start, end));
    return under.every((cell) => DELIMITER.test(cell)) && under.length === this.#cells().length;
  }

  /** @returns {Range[]} cells of a line of a table, without the spaces around them */
  #cells(at = this.#at) {
    const { start, end } = this.lines[at];
    const cells = [];
    let from = start;
    for (const part of this.source.slice(start, end).split(/(?<!\\)\|/)) {
      const lead = part.length - part.trimStart().length;
      cells.push({ start: from + lead, end: from + lead + part.trim().length });
      from += part.length + 1;
    }
    const isEmpty = (cell) => cell.start === cell.end;
    if (cells.length > 1 && isEmpty(cells[0])) cells.shift();
    if (cells.length > 1 && isEmpty(cells.at(-1))) cells.pop();
    return cells;
  }

  #paragraph() {
    const lines = [];
    do lines.push(this.lines[this.#at++]); // with its indentation: code without fences stays readable
    while (this.#text() !== "" && (this.depth >= MAX_DEPTH || !this.#startsBlock()));
    return { tag: "p", children: inline(this.source, lines) };
  }

  /** @returns {boolean} whether this line ends a paragraph */
  #startsBlock() {
    const text = this.#text();
    return [FENCE, HEADING, RULE, QUOTE, FIRST_ITEM].some((rule) => rule.test(text)) || this.#startsTable();
  }
}

/**
 * Texts, emphasis, code and links of some lines.
 *
 * @param {string} source
 * @param {Range[]} lines
 * @param {boolean} [hasLinks]
 * @returns {(Tree | Range)[]}
 */
function inline(source, lines, hasLinks = true) {
  const end = lines.at(-1).end;
  source = source.slice(0, end); // no search goes beyond the lines
  /** @type {(Tree | Range | {mark: string, range: Range, partner?: number})[]} */
  const tokens = [];
  /** @type {Record<string, number>} places of the marks in `tokens` that can be closed: at most one of each kind */
  let open = {};
  let at = lines[0].start;
  let line = 0;
  const push = (from, to) => {
    while (line + 1 < lines.length && lines[line + 1].start <= from) line += 1;
    tokens.push(...clip(lines, line, from, to));
  };
  const closings = closingTicks(source, at, end);
  let from = at; // of the text before `at` that is not pushed yet
  while (at < end) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(source);
    if (!special) break;
    at = special.index;
    const found = linkAt(source, special[0], at, hasLinks);
    const mark = special[0];
    if (found) {
      push(from, at);
      const children = inline(source, [found.label], false);
      tokens.push({ tag: "a", attributes: { href: found.url, target: "_blank", rel: "noopener noreferrer" }, children });
      from = at = found.end;
    } else if (mark === "\\") {
      if (/[!-/:-@[-`{-~]/.test(source[at + 1] ?? "")) {
        push(from, at);
        from = at + 1;
      }
      at += 2;
    } else if (mark === "`") {
      const length = runLength(source, at);
      const closing = closings.get(at);
      if (closing === undefined) at += length;
      else {
        push(from, at);
        const place = tokens.length;
        push(at + length, closing);
        tokens.push({ tag: "code", children: tokens.splice(place) });
        from = at = closing + length;
      }
    } else if ("*_~".includes(mark)) {
      const length = runLength(source, at);
      const kinds = kindsOf(mark, length, open);
      const [before, after] = [source[at - 1] ?? " ", source[at + length] ?? " "];
      const isInWord = mark === "_" && /\w/.test(before) && /\w/.test(after);
      if (kinds.length && !isInWord) push(from, at);
      for (const kind of isInWord ? [] : kinds) {
        const token = { mark: kind, range: { start: at, end: at + kind.length } };
        if (kind in open && /\S/.test(before)) {
          const place = open[kind];
          tokens[place].partner = tokens.length;
          token.partner = place;
          open = Object.fromEntries(Object.entries(open).filter(([, other]) => other < place));
        } else if (!(kind in open) && /\S/.test(after)) open[kind] = tokens.length;
        tokens.push(token);
        from = at += kind.length;
      }
      at = Math.max(at, special.index + length);
    } else at += mark.length;
  }
  push(from, end);
  return nested(tokens);
}

/**
 * @param {Range[]} lines
 * @param {number} line the first one that the range touches
 * @param {number} from
 * @param {number} to
 * @returns {Range[]} what of the range is in the lines, with their line breaks
 */
function clip(lines, line, from, to) {
  const ranges = [];
  for (; line < lines.length && lines[line].start < to; line++) {
    const lineEnd = line + 1 < lines.length ? lines[line].end + 1 : lines[line].end;
    const range = { start: Math.max(from, lines[line].start), end: Math.min(to, lineEnd) };
    if (range.start < range.end) ranges.push(range);
  }
  return ranges;
}

/** @returns {{label: Range, url: string, end: number} | null} the link that begins here */
function linkAt(source, mark, at, hasLinks) {
  if (!hasLinks || !/[[h]/.test(mark)) return null;
  const isBare = mark.startsWith("h");
  if (isBare && /\w/.test(source[at - 1] ?? "")) return null;
  const rule = isBare ? BARE : LINK;
  rule.lastIndex = at;
  const found = rule.exec(source);
  if (!found) return null;
  const text = isBare ? found[0].replace(/[.,;:!?)\]'_~]{1,20}$/, "") : found[2];
  const url = safeUrl(text);
  if (url === null) return null;
  if (isBare) return { label: { start: at, end: at + text.length }, url, end: at + text.length };
  const start = at + mark.length;
  const label = { start, end: start + found[1].length };
  return { label: found[1] ? label : { start: at, end: at + found[0].length }, url, end: at + found[0].length };
}

/** @returns {number} how often the character at a place is repeated */
function runLength(source, at) {
  let end = at + 1;
  while (source[end] === source[at]) end += 1;
  return end - at;
}

/** @returns {Map<number, number>} for every run of backticks the next one of the same length */
function closingTicks(source, start, end) {
  const next = new Map();
  const closings = new Map();
  for (const { index, 0: run } of [...source.slice(start, end).matchAll(/`+/g)].reverse()) {
    if (next.has(run.length)) closings.set(start + index, next.get(run.length));
    next.set(run.length, start + index);
  }
  return closings;
}

/** @returns {string[]} kinds of emphasis of a run of marks, those that were opened last first */
function kindsOf(mark, length, open) {
  const [one, two] = [mark, mark + mark];
  if (length < 3) return [mark.repeat(length)].filter((kind) => kind in TAGS);
  if (length > 3 || mark === "~") return [];
  return (open[two] ?? -1) < (open[one] ?? -1) ? [one, two] : [two, one];
}

/** @returns {(Tree | Range)[]} tokens with what is between two partners inside an element */
function nested(tokens) {
  const levels = [[]];
  for (const [place, token] of tokens.entries()) {
    if (token.mark === undefined) levels.at(-1).push(token);
    else if (token.partner === undefined) levels.at(-1).push(token.range);
    else if (token.partner < place) levels.pop();
    else {
      const children = [];
      levels.at(-1).push({ tag: TAGS[token.mark], children });
      levels.push(children);
    }
  }
  return levels[0];
}
