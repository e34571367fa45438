/** Server-sent events from a stream of bytes. */

/** Incremental parser of the event stream format. Comments and fields other than `data` are skipped. */
export class EventParser {
  #rest = "";
  /** @type {string[]} */
  #lines = [];

  /**
   * @param {string} text the next part of the stream; may end anywhere
   * @returns {string[]} data of the events that it completes
   */
  push(text) {
    const events = [];
    let buffer = this.#rest + text;
    // a CR at the end may be the first half of CRLF
    const held = buffer.endsWith("\r") ? "\r" : "";
    if (held) buffer = buffer.slice(0, -1);
    const lines = buffer.split(/\r\n|\n|\r/);
    this.#rest = lines.pop() + held;
    for (const line of lines) this.#take(line, events);
    return events;
  }

  /**
   * @param {string} line
   * @param {string[]} events
   */
  #take(line, events) {
    if (line === "") {
      if (this.#lines.length) events.push(this.#lines.join("\n"));
      this.#lines = [];
    } else if (line === "data" || line.startsWith("data:")) {
      this.#lines.push(line.slice(5).replace(/^ /, ""));
    }
  }
}

/**
 * Data of the events of a response, one after another.
 *
 * @param {ReadableStream<Uint8Array>} stream
 * @returns {AsyncGenerator<string>}
 */
export async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
