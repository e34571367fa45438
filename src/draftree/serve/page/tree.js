/** Drawing of one round: the drafted tree from top to bottom, its accepted path straight down on the left. */

import { el, svg } from "./dom.js";
import { acceptedNodes, depthsOf, describeRound, isTargetCut, outcomesOf, targetAfter, visible } from "./rounds.js";

const CHAR = 7.3;
const PADDING = 20;
const HEIGHT = 22;
const STEP = 37;
const GAP = 10;
const LONGEST = 12;

/**
 * @typedef {{kind: "root" | "accepted" | "rejected" | "cut" | "target", label: string, title: string, x: number,
 *     y: number, width: number, parent: number}} Box
 */

/**
 * Boxes of a round: the root, its nodes, then the target token.
 *
 * @param {import("./rounds.js").Round} round
 * @returns {{boxes: Box[], width: number, height: number}} positions in pixels; parent is an index of boxes, -1 for
 *     none
 */
export function layoutTree(round) {
  const entries = entriesOf(round);
  const columns = columnsOf(entries);
  const widths = [];
  for (const [i, entry] of entries.entries()) {
    widths[columns[i]] = Math.max(widths[columns[i]] ?? 0, entry.label.length * CHAR + PADDING);
  }
  const lefts = [];
  let left = 1;
  for (const width of widths) {
    lefts.push(left);
    left += width + GAP;
  }
  const boxes = entries.map((entry, i) => ({
    ...entry,
    x: lefts[columns[i]],
    y: 1 + entry.depth * STEP,
    width: widths[columns[i]],
  }));
  const deepest = Math.max(...entries.map((entry) => entry.depth));
  return { boxes, width: left - GAP + 1, height: deepest * STEP + HEIGHT + 2 };
}

/** @param {import("./rounds.js").Round} round */
function entriesOf(round) {
  const [depths, outcomes] = [depthsOf(round.nodes), outcomesOf(round)];
  const entries = [entry("root", round.root ?? "", -1, 0, targetAfter(round, -1))];
  for (const [i, node] of round.nodes.entries()) {
    entries.push(entry(outcomes[i], node.text, node.parent + 1, depths[i], targetAfter(round, i)));
  }
  if (round.bonus) {
    const last = (acceptedNodes(round).at(-1) ?? -1) + 1;
    entries.push(entry(isTargetCut(round) ? "cut" : "target", round.bonus.text, last, entries[last].depth + 1));
  }
  return entries;
}

/**
 * @param {Box["kind"]} kind
 * @param {string} text
 * @param {number} parent index of an entry
 * @param {number} depth
 * @param {import("./rounds.js").Token | null} [target] the target token after this one
 */
function entry(kind, text, parent, depth, target = null) {
  const marks = { root: "", accepted: "✓ ", rejected: "✕ ", cut: "– ", target: "◆ " };
  const shown = kind === "root" && text === "" ? "prompt" : visible(text);
  const short = shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown;
  const title = target ? `${shown}\ntarget token after it: ${visible(target.text)}` : shown;
  return { kind, label: marks[kind] + short, title, parent, depth };
}

/**
 * Column of every entry: the first child continues its parent's column, the others open new ones to the right. The
 * accepted path and the target token come first.
 */
function columnsOf(entries) {
  const children = entries.map(() => []);
  for (const [i, item] of entries.entries()) if (item.parent >= 0) children[item.parent].push(i);
  const rank = (i) => (entries[i].kind === "rejected" ? 1 : 0);
  for (const list of children) list.sort((a, b) => rank(a) - rank(b));
  const columns = entries.map(() => 0);
  let used = 0;
  const stack = [0];
  while (stack.length) {
    const at = stack.pop();
    const isFirst = entries[at].parent < 0 || children[entries[at].parent][0] === at;
    columns[at] = isFirst ? columns[Math.max(0, entries[at].parent)] : ++used;
    for (const child of [...children[at]].reverse()) stack.push(child);
  }
  return columns;
}

/**
 * @param {import("./rounds.js").Round} round
 * @returns {SVGElement} an image whose accessible name is the round in one sentence
 */
export function drawTree(round) {
  const { boxes, width, height } = layoutTree(round);
  const picture = svg("svg", { class: "tree", role: "img", "aria-label": describeRound(round), width, height });
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  for (const box of boxes) if (box.parent >= 0) picture.append(edge(boxes[box.parent], box));
  for (const box of boxes) {
    picture.append(
      svg(
        "g",
        { class: `node ${box.kind}` },
        svg("title", {}, box.title),
        svg("rect", { x: box.x, y: box.y, width: box.width, height: HEIGHT, rx: box.kind === "target" ? 11 : 6 }),
        svg("text", { x: box.x + box.width / 2, y: box.y + 15.5, "text-anchor": "middle" }, box.label),
      ),
    );
  }
  return picture;
}

/** Line from the bottom of a parent to the top of a child. */
function edge(from, to) {
  const [x1, x2] = [from.x + from.width / 2, to.x + to.width / 2];
  const [y1, y2] = [from.y + HEIGHT, to.y];
  const middle = y1 + (y2 - y1) / 2;
  return svg("path", { class: `edge ${to.kind}`, d: `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}` });
}

/**
 * @param {import("./rounds.js").Round} round
 * @returns {HTMLTableElement} the same content as the drawing
 */
export function treeTable(round) {
  const [depths, outcomes] = [depthsOf(round.nodes), outcomesOf(round)];
  const targetWords = (node) => (targetAfter(round, node) ? visible(targetAfter(round, node).text) : "–");
  const rows = round.nodes.map((node, i) => [
    String(depths[i]),
    visible(node.text),
    node.parent < 0 ? "last token" : visible(round.nodes[node.parent].text),
    (node.sources ?? []).join(", ") || "drafter",
    outcomes[i],
    targetWords(node.parent),
  ]);
  if (round.bonus) {
    const last = acceptedNodes(round).at(-1);
    const parent = last === undefined ? "last token" : visible(round.nodes[last].text);
    const depth = String(acceptedNodes(round).length + 1);
    const outcome = isTargetCut(round) ? "cut" : "target";
    rows.push([depth, visible(round.bonus.text), parent, "target", outcome, targetWords(last ?? -1)]);
  }
  const names = ["Depth", "Token", "After", "From", "Outcome", "Target token"];
  const head = names.map((name) => el("th", { scope: "col" }, name));
  const body = rows.map((cells) => el("tr", { class: cells[4] }, ...cells.map((cell) => el("td", {}, cell))));
  return el("table", { class: "grid" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}
