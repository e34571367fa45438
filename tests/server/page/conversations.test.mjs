import assert from "node:assert/strict";
import { test } from "node:test";
import {
  MAX_CHARS,
  MAX_KEPT,
  asJson,
  asMarkdown,
  readConversations,
  titleOf,
  withinLimits,
} from "../../../src/draftree/serve/page/conversations.js";

const conversation = (id, ...texts) => ({
  id,
  time: 1,
  model: "m",
  turns: texts.map((content, i) => ({ role: i % 2 ? "assistant" : "user", content })),
});

test("only well-formed conversations are read", () => {
  const good = conversation("1", "a", "b");
  const bad = [
    null, 1, "x", {}, { ...good, id: 1 }, { ...good, time: "1" }, { ...good, turns: {} }, { ...good, turns: [{}] },
    { ...good, turns: [{ role: "system", content: "x" }] }, { ...good, turns: [{ role: "user", content: ["x"] }] },
  ];
  assert.deepEqual(readConversations(JSON.stringify([...bad, good])), [good]);
  for (const text of [null, "", "{", "{}", "null", "[]"]) assert.deepEqual(readConversations(text), []);
});

test("the newest conversations are kept, within both limits", () => {
  const many = Array.from({ length: MAX_KEPT + 5 }, (_, i) => conversation(String(i), "a"));
  assert.deepEqual(withinLimits(many), many.slice(0, MAX_KEPT));
  const half = "x".repeat(MAX_CHARS / 2);
  const large = [conversation("a", half), conversation("b", half), conversation("c", "x")];
  assert.deepEqual(withinLimits(large).map((one) => one.id), ["a", "b"]);
  assert.deepEqual(withinLimits([conversation("d", `${half}${half}x`)]), []);
});

test("a title is the beginning of the first message", () => {
  assert.equal(titleOf(conversation("1", "  two\nlines ")), "two lines");
  assert.equal(titleOf(conversation("1", "x".repeat(100))).length, 61);
});

test("exports have the system prompt and all turns", () => {
  const one = conversation("1", "Hi", "**Hello**");
  assert.equal(asMarkdown(one, "Be kind"), "## System\n\nBe kind\n\n## You\n\nHi\n\n## m\n\n**Hello**\n");
  assert.deepEqual(JSON.parse(asJson(one, "")), { model: "m", messages: one.turns });
});
