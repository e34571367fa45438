import assert from "node:assert/strict";
import { test } from "node:test";
import { EventParser, eventsOf } from "../../../src/draftree/serve/page/sse.js";

const STREAM = 'data: {"a": 1}\r\n\r\n: comment\nevent: x\ndata:two\ndata: lines\n\ndata\n\ndata: [DONE]\n\n';
const EVENTS = ['{"a": 1}', "two\nlines", "", "[DONE]"];

test("events are the same for every division of the stream", () => {
  for (let size = 1; size <= STREAM.length; size++) {
    const parser = new EventParser();
    const events = [];
    for (let at = 0; at < STREAM.length; at += size) events.push(...parser.push(STREAM.slice(at, at + size)));
    assert.deepEqual(events, EVENTS, `parts of ${size} characters`);
  }
});

test("an event without its blank line is not complete", () => {
  assert.deepEqual(new EventParser().push("data: half\n"), []);
});

test("characters that are divided between chunks are whole", async () => {
  const bytes = new TextEncoder().encode("data: naïve — 木\n\n");
  const stream = new ReadableStream({
    start(controller) {
      for (const byte of bytes) controller.enqueue(new Uint8Array([byte]));
      controller.close();
    },
  });
  const events = [];
  for await (const event of eventsOf(stream)) events.push(event);
  assert.deepEqual(events, ["naïve — 木"]);
});

test("leaving the loop cancels the stream", async () => {
  let cancelled = false;
  const stream = new ReadableStream({
    pull: (controller) => controller.enqueue(new TextEncoder().encode("data: x\n\n")),
    cancel: () => (cancelled = true),
  });
  for await (const event of eventsOf(stream)) {
    assert.equal(event, "x");
    break;
  }
  assert.ok(cancelled);
});
