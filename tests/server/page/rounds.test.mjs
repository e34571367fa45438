import assert from "node:assert/strict";
import { test } from "node:test";
import {
  RoundLog,
  acceptanceByDepth,
  acceptedOthers,
  depthsOf,
  describeRound,
  outcomesOf,
  targetAfter,
  visible,
} from "../../../src/draftree/serve/page/rounds.js";
import { layoutTree } from "../../../src/draftree/serve/page/tree.js";

const node = (text, parent, accepted) => ({ id: 1, text, parent, accepted, sources: ["ngram"] });
const BRANCHED = {
  index: 0,
  position: 5,
  nodes: [node(" b", -1, true), node(" x", -1, false), node(" c", 0, true), node(" y", 0, false), node(" z", 3, false)],
  bonus: { id: 9, text: "." },
};
const EMPTY = { index: 0, position: 4, nodes: [], bonus: { id: 1, text: "a" } };

test("every piece belongs to the round that wrote its token", () => {
  const log = new RoundLog();
  log.add(EMPTY);
  log.add(BRANCHED);
  const pieces = [["a", "target"], [" b", "drafted"], [" c", "drafted"], [".", "target"]];
  const numbers = pieces.map(([text, origin]) => log.roundOf({ text, origin }).number);
  assert.deepEqual(numbers, [1, 2, 2, 2]);
  assert.equal(log.tokens, 4);
});

test("a character of several tokens belongs to the round that completed it", () => {
  const log = new RoundLog();
  log.add({ ...EMPTY, bonus: { id: 1, text: "\ufffd" } });
  log.add({ ...EMPTY, nodes: [node("\ufffd", -1, true)], bonus: { id: 2, text: "!" } });
  assert.equal(log.roundOf({ text: "木", origin: "drafted" }).number, 2);
  assert.equal(log.roundOf({ text: "!", origin: "target" }).number, 2);
});

test("a piece of plain decoding is the round's target token", () => {
  const log = new RoundLog();
  log.add(EMPTY);
  assert.equal(log.roundOf({ text: "a", origin: "plain" }).number, 1);
});

test("without rounds a piece has none", () => {
  assert.equal(new RoundLog().roundOf({ text: "a", origin: "plain" }), null);
});

test("a round starts at the last written token", () => {
  const log = new RoundLog();
  assert.equal(log.add(EMPTY).root, "");
  assert.equal(log.add(BRANCHED).root, "a");
  assert.equal(log.add(EMPTY).root, ".");
});

test("depths follow parents", () => {
  assert.deepEqual(depthsOf(BRANCHED.nodes), [1, 1, 2, 2, 3]);
});

test("acceptance counts rounds that reached a depth", () => {
  assert.deepEqual(acceptanceByDepth([BRANCHED, EMPTY, { ...BRANCHED, nodes: [node("q", -1, false)] }]), [
    { depth: 1, drafted: 2, accepted: 1 },
    { depth: 2, drafted: 1, accepted: 1 },
    { depth: 3, drafted: 1, accepted: 0 },
  ]);
});

test("a round is described in words", () => {
  assert.equal(describeRound(BRANCHED), "2 of 5 drafted tokens accepted: “␣b c”; target token “.”.");
  assert.equal(describeRound(EMPTY), "No draft; target token “a”.");
  assert.equal(visible("\n \t "), "⏎ ⇥␣");
  assert.equal(visible(""), "∅");
});

test("the accepted path is straight, and no two boxes overlap", () => {
  const { boxes, width, height } = layoutTree({ ...BRANCHED, root: "a" });
  const kinds = ["root", "accepted", "rejected", "accepted", "rejected", "rejected", "target"];
  assert.deepEqual(boxes.map((box) => box.kind), kinds);
  const path = boxes.filter((box) => box.kind !== "rejected");
  assert.equal(new Set(path.map((box) => box.x)).size, 1);
  assert.equal(boxes.at(-1).parent, 3, "the target token follows the last accepted node");
  for (const [i, a] of boxes.entries()) {
    assert.ok(a.x >= 0 && a.x + a.width <= width && a.y + 22 <= height);
    for (const b of boxes.slice(i + 1)) assert.ok(a.y !== b.y || a.x + a.width <= b.x || b.x + b.width <= a.x);
  }
});

test("a deep chain with siblings keeps its boxes apart", () => {
  const nodes = [];
  for (let i = 0; i < 120; i++) nodes.push(node(` n${i}`, i % 3 ? i - 1 : Math.floor(i / 2) - 1, false));
  const { boxes } = layoutTree({ index: 0, position: 0, nodes, bonus: null });
  const places = new Set(boxes.map((box) => `${box.x},${box.y}`));
  assert.equal(places.size, 121);
});

test("tokens after the end of the text are cut off", () => {
  const log = new RoundLog();
  log.add(EMPTY);
  const last = log.add(BRANCHED);
  log.close(2);
  assert.equal(last.written, 1);
  assert.deepEqual(outcomesOf(last), ["accepted", "rejected", "cut", "rejected", "rejected"]);
  assert.match(describeRound(last), /The text ends within this round\.$/);
  assert.deepEqual(layoutTree(last).boxes.map((box) => box.kind).slice(-1), ["cut"]);
  log.close(4);
  assert.deepEqual(outcomesOf(last)[2], "accepted");
  assert.equal(layoutTree(last).boxes.at(-1).kind, "target");
});

const token = (id, text) => ({ id, text });
const TRACED = {
  ...BRANCHED,
  nodes: BRANCHED.nodes.map((each, i) => ({ ...each, id: i + 1 })),
  target_tokens: [token(1, " b"), token(3, " c"), token(7, " q"), token(9, "."), token(8, " r"), token(7, " s")],
};

test("the target token is known at the root and at every node", () => {
  const texts = [-1, 0, 1, 2, 3, 4].map((i) => targetAfter(TRACED, i).text);
  assert.deepEqual(texts, [" b", " c", " q", ".", " r", " s"]);
  for (const target_tokens of [[], null, undefined]) assert.equal(targetAfter({ ...TRACED, target_tokens }, -1), null);
  const titles = layoutTree(TRACED).boxes.map((box) => box.title.split("\n")[1]);
  assert.equal(titles[0], "target token after it: ␣b");
  assert.equal(titles[3], "target token after it: .");
  assert.equal(layoutTree(BRANCHED).boxes[0].title, "prompt");
});

test("accepted tokens that are not the target token are named", () => {
  assert.deepEqual(acceptedOthers(TRACED), []);
  assert.doesNotMatch(describeRound(TRACED), /not the target token/);
  const lossy = { ...TRACED, target_tokens: [token(1, " b"), token(4, " y"), ...TRACED.target_tokens.slice(2)] };
  assert.deepEqual(acceptedOthers(lossy), [2]);
  assert.match(describeRound(lossy), /1 of the accepted is not the target token\.$/);
  assert.deepEqual(acceptedOthers({ ...lossy, target_tokens: null }), []);
});
