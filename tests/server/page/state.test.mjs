import assert from "node:assert/strict";
import { test } from "node:test";
import {
  DEFAULTS,
  decodeState,
  encodeState,
  requestBody,
  stopStrings,
  withSystem,
} from "../../../src/draftree/serve/page/state.js";

const STATE = {
  ...DEFAULTS,
  mode: "compare",
  model: "a/b model",
  draft: "suffix",
  temperature: "0",
  top_p: "0.9",
  seed: "17",
  stop: "END\n\\n\\n",
  system: "Be brief & clear #1",
  prompt: "1 + 1 = ?\nnaïve 木 %20",
  order: "together",
};

test("a state survives the fragment", () => {
  assert.deepEqual(decodeState(`#${encodeState(STATE)}`), STATE);
});

test("defaults give an empty fragment", () => {
  assert.equal(encodeState({ ...DEFAULTS }), "");
  assert.deepEqual(decodeState(""), { ...DEFAULTS });
});

test("unknown names and invalid choices are dropped", () => {
  const state = decodeState("#mode=evil&key=secret&__proto__=x&order=together");
  assert.deepEqual(state, { ...DEFAULTS, order: "together" });
});

test("stop strings have escapes and no empty lines", () => {
  assert.deepEqual(stopStrings("a\n\n\\n\\nb\n\\t\\\\n"), ["a", "\n\nb", "\t\\n"]);
});

test("a chat body has numbers, the drafter and the report", () => {
  const messages = withSystem(STATE, [{ role: "user", content: "hi" }]);
  assert.deepEqual(requestBody(STATE, { seed: 3, messages }), {
    model: "a/b model",
    seed: 3,
    stream: true,
    stream_options: { include_usage: true },
    messages: [{ role: "system", content: "Be brief & clear #1" }, { role: "user", content: "hi" }],
    temperature: 0,
    top_p: 0.9,
    max_tokens: 256,
    stop: ["END", "\n\n"],
    draft: "suffix",
    draftree: { pieces: true, rounds: true },
  });
});

test("empty fields are left to the server, and a request can replace the drafter", () => {
  const state = { ...DEFAULTS, model: "m", temperature: "", max_tokens: " " };
  const body = requestBody(state, { seed: 1, prompt: "p", draft: "none" });
  assert.equal(body.prompt, "p");
  assert.equal(body.draft, "none");
  for (const name of ["temperature", "max_tokens", "stop", "messages"]) assert.ok(!(name in body), name);
});

test("the system prompt is left out when it is blank", () => {
  assert.deepEqual(withSystem({ ...DEFAULTS, system: " \n" }, []), []);
});

test("what is no number is dropped, and an empty one is kept", () => {
  const state = decodeState("#temperature=hot&top_p=0.5&max_tokens=&seed=0x10");
  assert.deepEqual([state.temperature, state.top_p, state.max_tokens, state.seed], ["", "0.5", "", ""]);
});
