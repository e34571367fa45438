/** Spoken output for screen readers: streamed text in whole sentences, and short messages. */

/**
 * @param {string} text
 * @returns {{ready: string, rest: string}} whole sentences and lines, and what follows them
 */
export function splitSentences(text) {
  const ends = [...text.matchAll(/[.!?…:;](?=\s)|\n/g)];
  const last = ends.at(-1);
  const cut = last ? last.index + last[0].length : 0;
  return { ready: text.slice(0, cut), rest: text.slice(cut) };
}

/** Writes to a polite live region. */
export class Announcer {
  #buffer = "";

  /** @param {HTMLElement} region with aria-live */
  constructor(region) {
    this.region = region;
  }

  /** @param {string} text the next part of a streamed text */
  stream(text) {
    const { ready, rest } = splitSentences(this.#buffer + text);
    this.#buffer = rest;
    if (ready.trim()) this.say(ready);
  }

  /** Speaks the rest of a streamed text. */
  end() {
    if (this.#buffer.trim()) this.say(this.#buffer);
    this.#buffer = "";
  }

  /** @param {string} message */
  say(message) {
    const line = document.createElement("p");
    line.textContent = message.trim();
    this.region.append(line);
    while (this.region.childElementCount > 20) this.region.firstElementChild?.remove();
  }
}
