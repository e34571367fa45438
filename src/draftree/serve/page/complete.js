/** Completion: the model continues the prompt as it is. */

import { el } from "./dom.js";
import { View } from "./view.js";
import { seedOf, write } from "./write.js";

/** View of one prompt and its continuation. */
export class CompleteView extends View {
  /** @param {import("./write.js").Context} context */
  constructor(context) {
    super(context, "completion");
  }

  /**
   * @param {string} prompt
   * @param {AbortSignal} signal
   */
  async send(prompt, signal) {
    const card = el("article", { class: "panel card" }, el("p", { class: "prompt-echo" }, prompt));
    this.host.replaceChildren(card);
    const seed = seedOf(this.context.state);
    await write(this.context, { kind: "complete", host: card, label: "Continuation", seed, prompt }, signal);
  }
}
