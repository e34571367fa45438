import assert from "node:assert/strict";
import { test } from "node:test";
import { Reading, increase, loadOf } from "../../../src/draftree/serve/page/metrics.js";

const TEXT = `# HELP a Help with "quotes" {and braces} 1
# TYPE a gauge
a 3.0
a_total{model="m",draft="x"} 1.5e+3
a_total{model="m",draft="y",replica="r}1"} 2 1395066363000
a_total{model="a \\"b\\" \\\\ \\n",draft="x"} 7.0
edge{} +Inf
vllm:edge{le="+Inf"} NaN

not a sample
`;

test("samples have labels, escapes, exponents and times", () => {
  const reading = new Reading(TEXT, 0);
  assert.equal(reading.sum("a"), 3);
  assert.equal(reading.sum("a_total", { model: "m" }), 1502);
  assert.equal(reading.sum("a_total", { replica: "r}1" }), 2);
  assert.equal(reading.sum("a_total", { model: 'a "b" \\ \n' }), 7);
  assert.equal(reading.sum("edge"), Infinity);
  assert.ok(Number.isNaN(reading.sum("vllm:edge")));
  assert.equal(reading.sum("a_total", { model: "other" }), null);
  assert.equal(reading.sum("not"), null);
});

const counters = (model, tokens, drafts, drafted, accepted, requests) => `
draftree_sequences_running{model="${model}"} 4
draftree_sequences_waiting{model="${model}"} 1
draftree_generated_tokens_total{model="${model}",draft="x"} ${tokens}
draftree_generated_tokens_total{model="${model}",draft="none"} 10
draftree_drafts_total{model="${model}",draft="x"} ${drafts}
draftree_draft_tokens_total{model="${model}",draft="x"} ${drafted}
draftree_accepted_tokens_total{model="${model}",draft="x"} ${accepted}
draftree_request_seconds_count{model="${model}",draft="x"} ${requests}`;

test("rates are those between two readings", () => {
  const before = new Reading(counters("m", 100, 10, 50, 20, 3), 1000);
  const now = new Reading(counters("m", 250, 40, 170, 65, 4), 3500) ;
  assert.deepEqual(loadOf(before, now, "m"), {
    running: 4,
    waiting: 1,
    tokensPerSecond: 60,
    requestsPerSecond: 0.4,
    accepted: 45 / 120,
    perRound: 2.5,
  });
});

const NO_RATES = { tokensPerSecond: null, requestsPerSecond: null, accepted: null, perRound: null };

test("one reading has no rates", () => {
  const now = new Reading(counters("m", 100, 10, 50, 20, 3), 1000);
  assert.deepEqual(loadOf(null, now, "m"), { running: 4, waiting: 1, ...NO_RATES });
});

test("an idle model has rates of zero and no accepted share", () => {
  const [before, now] = [0, 1000].map((time) => new Reading(counters("m", 100, 10, 50, 20, 3), time));
  const rates = { tokensPerSecond: 0, requestsPerSecond: 0, accepted: null, perRound: null };
  assert.deepEqual(loadOf(before, now, "m"), { running: 4, waiting: 1, ...rates });
});

test("counters of a restarted server give no rates", () => {
  const before = new Reading(counters("m", 100, 10, 50, 20, 3), 0);
  const now = new Reading(counters("m", 5, 1, 2, 1, 0), 1000);
  assert.deepEqual(loadOf(before, now, "m"), { running: 4, waiting: 1, ...NO_RATES });
});

test("a counter that appears later began at zero", () => {
  const now = new Reading(counters("m", 100, 10, 50, 20, 3), 1000);
  assert.equal(increase(new Reading("", 0), now, "draftree_drafts_total", { model: "m" }), 10);
});
