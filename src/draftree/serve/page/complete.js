/** Completion: the model continues the prompt as it is. */

import { byId, el } from "./dom.js";
import { seedOf, write } from "./write.js";

/** View of one prompt and its continuation. */
export class CompleteView {
  #host = byId("completion");

  /** @param {import("./write.js").Context} context */
  constructor(context) {
    this.context = context;
  }

  /** @returns {boolean} whether there is no text */
  get isEmpty() {
    return this.#host.childElementCount === 0;
  }

  /** Removes the text. */
  clear() {
    this.#host.replaceChildren();
  }

  /**
   * @param {string} prompt
   * @param {AbortSignal} signal
   */
  async send(prompt, signal) {
    const card = el("article", { class: "panel card" }, el("p", { class: "prompt-echo" }, prompt));
    this.#host.replaceChildren(card);
    const seed = seedOf(this.context.state);
    await write(this.context, { kind: "complete", host: card, label: "Continuation", seed, prompt }, signal);
  }
}
