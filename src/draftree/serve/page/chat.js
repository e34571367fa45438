/** Chat: a conversation of which every turn is sent again with the next one. */

import { el } from "./dom.js";
import { withSystem } from "./state.js";
import { View } from "./view.js";
import { seedOf, write } from "./write.js";

/** View of the conversation. */
export class ChatView extends View {
  /** @type {{role: string, content: string}[]} */
  #history = [];

  /** @param {import("./write.js").Context} context */
  constructor(context) {
    super(context, "log");
  }

  /** Removes the conversation. */
  clear() {
    this.#history = [];
    super.clear();
  }

  /**
   * @param {string} prompt
   * @param {AbortSignal} signal
   */
  async send(prompt, signal) {
    const question = turn("user", "You");
    question.append(el("div", { class: "said" }, prompt));
    const answer = turn("assistant", "Model");
    const card = el("div", { class: "panel card" });
    answer.append(card);
    this.host.append(question, answer);
    const history = [...this.#history, { role: "user", content: prompt }];
    const { state } = this.context;
    const options = { kind: "chat", host: card, label: "Answer", seed: seedOf(state) };
    try {
      const run = await write(this.context, { ...options, messages: withSystem(state, history) }, signal);
      this.#history = [...history, { role: "assistant", content: run.text }];
    } catch (error) {
      answer.remove();
      question.remove();
      throw error;
    }
  }
}

/**
 * @param {string} role
 * @param {string} name
 */
function turn(role, name) {
  return el("li", { class: role }, el("span", { class: "who" }, name));
}
