import assert from "node:assert/strict";
import { test } from "node:test";
import { splitSentences } from "../../../src/draftree/serve/page/announcer.js";
import { ApiError, errorFrom, wordsFor } from "../../../src/draftree/serve/page/api.js";
import { linePoints } from "../../../src/draftree/serve/page/chart.js";
import { excerpt, firstDifference, verdict } from "../../../src/draftree/serve/page/difference.js";
import { duration, shown } from "../../../src/draftree/serve/page/load.js";
import { Run } from "../../../src/draftree/serve/page/run.js";

test("the first difference is counted in characters", () => {
  assert.equal(firstDifference("same", "same"), -1);
  assert.equal(firstDifference("😀a", "😀b"), 1);
  assert.equal(firstDifference("ab", "abc"), 2);
  assert.equal(firstDifference("", "x"), 0);
});

test("an excerpt marks cut ends", () => {
  assert.equal(excerpt("abc", 1), "abc");
  assert.equal(excerpt("x".repeat(100), 50), `…${"x".repeat(48)}…`);
});

test("only complete texts are identical or different", () => {
  assert.equal(verdict("a", "a", true).kind, "same");
  assert.equal(verdict("a", "b", true).kind, "different");
  assert.equal(verdict("a", "a", false).kind, "open");
  assert.equal(verdict("a", "b", false).kind, "open");
});

test("whole sentences are spoken, the rest waits", () => {
  assert.deepEqual(splitSentences("One. Two, th"), { ready: "One.", rest: " Two, th" });
  assert.deepEqual(splitSentences("3.14"), { ready: "", rest: "3.14" });
  assert.deepEqual(splitSentences("line\nnext"), { ready: "line\n", rest: "next" });
});

test("errors become words for the user", () => {
  const error = errorFrom({ error: { message: "temperature is -1", param: "temperature" } }, 400);
  assert.equal(wordsFor(error), "temperature is -1.");
  assert.equal(wordsFor(errorFrom({ error: { message: "the key is wrong" } }, 400)), "The key is wrong.");
  const long = errorFrom({ error: { message: "Too long.", param: "prompt" } }, 400);
  assert.equal(wordsFor(long), "Too long. Field: prompt.");
  assert.match(wordsFor(errorFrom({ error: { message: "No." } }, 401)), /API key/);
  assert.match(wordsFor(errorFrom({ error: { message: "Full." } }, 429, "7")), /7 s/);
  assert.match(wordsFor(errorFrom(undefined, 502)), /status 502/);
  assert.match(wordsFor(new TypeError("fetch failed")), /cannot be reached/);
  assert.ok(errorFrom({}, 500) instanceof ApiError);
});

test("a line fills its box", () => {
  assert.equal(linePoints([1], 100, 10), "");
  assert.equal(linePoints([0, 2, 1], 100, 10), "0,9 50,1 100,5");
  assert.equal(linePoints([0, 0], 100, 10), "0,9 100,9");
});

test("values of the status are texts", () => {
  assert.deepEqual([null, "", 2, 2.345, ["a", "b"], []].map(shown), ["–", "–", "2", "2.35", "a, b", "–"]);
  assert.deepEqual([5, 65, 7500].map(duration), ["5 s", "1 min 5 s", "2 h 5 min"]);
});

const chunk = (pieces, rounds) => ({
  choices: [{ delta: { content: pieces.map((piece) => piece.text).join("") } }],
  draftree: { pieces, rounds },
});

test("a run counts origins, and its speed leaves the first chunk out", () => {
  let clock = 1000;
  const run = new Run({ isPlain: false, seed: 1, now: () => clock });
  const round = (text) => ({ index: 0, position: 0, nodes: [], bonus: { id: 1, text } });
  clock = 1500;
  run.take(chunk([{ text: "a", origin: "target" }], [round("a")]));
  assert.equal(run.firstMs, 500);
  assert.equal(run.speed, null);
  clock = 2500;
  const pieces = [{ text: "b", origin: "target" }, { text: "c", origin: "target" }];
  const taken = run.take(chunk(pieces, [round("b"), round("c")]));
  assert.deepEqual(taken.map((piece) => piece.round.number), [2, 3]);
  assert.equal(run.speed, 2);
  assert.equal(run.text, "abc");
  const report = { explain: "why", stats: [{ rounds: 3, tokens_per_second: 9 }] };
  run.take({ choices: [], usage: { completion_tokens: 3 }, draftree: report });
  assert.deepEqual([run.speed, run.explain, run.tokens, run.acceptanceLength], [9, "why", 3, 1]);
  assert.deepEqual(run.counts, { drafted: 0, target: 3, plain: 0 });
});

test("a stream without our report is plain text", () => {
  const run = new Run({ isPlain: true, seed: 1 });
  assert.deepEqual(run.take({ choices: [{ text: "hi" }] }).map((piece) => piece.origin), ["plain"]);
  assert.equal(run.tokens, 1);
});
