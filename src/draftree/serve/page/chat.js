/** Chat: a conversation of which every turn is sent again with the next one. */

import { forget, keep, newConversation } from "./conversations.js";
import { button, byId, el } from "./dom.js";
import { withSystem } from "./state.js";
import { TextView } from "./text.js";
import { View } from "./view.js";
import { seedOf, textActions, write } from "./write.js";

/** View of the conversation. Every element of the host is a turn. */
export class ChatView extends View {
  conversation = newConversation();

  /**
   * @param {import("./write.js").Context} context
   * @param {(work: (signal: AbortSignal) => Promise<void>) => void} run runs a request that the view starts itself
   */
  constructor(context, run) {
    super(context, "log");
    this.run = run;
  }

  /** @param {import("./conversations.js").Conversation} conversation replaces the one in view */
  open(conversation) {
    this.conversation = conversation;
    byId("not-kept").hidden = true;
    const turns = conversation.turns.map(({ role, content }, at) =>
      role === "user" ? this.#question(content, at) : this.#kept(content),
    );
    this.host.replaceChildren(...turns);
  }

  /** Deletes the conversation, in the browser too. */
  clear() {
    forget(this.conversation.id);
    this.open(newConversation());
  }

  /**
   * @param {string} prompt
   * @param {AbortSignal} signal
   * @param {number} [at] turns that stay before it; those after them are replaced
   */
  async send(prompt, signal, at = this.conversation.turns.length) {
    const replaced = [...this.host.children].slice(at);
    const card = el("div", { class: "panel card" });
    const added = [this.#question(prompt, at), turn("assistant", "Model", card)];
    for (const element of replaced) element.remove();
    this.host.append(...added);
    const { state } = this.context;
    const turns = [...this.conversation.turns.slice(0, at), { role: "user", content: prompt }];
    const options = { kind: "chat", host: card, label: "Answer", seed: seedOf(state), isMarkdown: true };
    const model = state.model;
    try {
      const run = await write(this.context, { ...options, messages: withSystem(state, turns) }, signal);
      turns.push({ role: "assistant", content: run.text });
    } catch (error) {
      for (const element of added) element.remove();
      this.host.append(...replaced);
      throw error;
    }
    card.querySelector(".meta").append(this.#regenerate());
    Object.assign(this.conversation, { model, turns });
    byId("not-kept").hidden = keep(this.conversation);
  }

  /** @returns {HTMLElement} a button that asks for the last answer again */
  #regenerate() {
    const again = () => {
      const at = this.conversation.turns.length - 2;
      this.run((signal) => this.send(this.conversation.turns[at].content, signal, at));
    };
    return button("Regenerate", again, "request-action last-only");
  }

  /** @param {string} content @param {number} at turns before it */
  #question(content, at) {
    const said = el("div", { class: "said" }, content);
    const question = turn("user", "You", said);
    const edit = button("Edit", () => this.#edit(question, content, at), "request-action");
    question.firstElementChild.append(edit);
    return question;
  }

  /** @param {string} content of an answer whose rounds are not known any more */
  #kept(content) {
    const view = new TextView("Answer", () => {}, true);
    view.add({ text: content, origin: "plain" }, null);
    const meta = el("p", { class: "meta" }, ...textActions(view), this.#regenerate());
    return turn("assistant", "Model", el("div", { class: "panel card" }, view.element, meta));
  }

  /** Shows a form in place of a message; sending it replaces the message and what follows. */
  #edit(question, content, at) {
    const rows = Math.min(content.split("\n").length + 1, 12);
    const field = el("textarea", { rows, "aria-label": "Message" });
    field.value = content;
    const cancel = button("Cancel", () => question.replaceWith(this.#question(content, at)));
    const send = el("button", { type: "submit", class: "primary request-action" }, "Send");
    const form = el("form", { class: "edit" }, field, el("div", { class: "actions" }, cancel, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.run((signal) => this.send(field.value, signal, at));
    });
    question.replaceChildren(question.firstElementChild, form);
    question.querySelector(".who button").remove();
    field.focus();
  }
}

/**
 * @param {string} role
 * @param {string} name
 * @param {HTMLElement} content
 */
function turn(role, name, content) {
  return el("li", { class: role }, el("span", { class: "who" }, name), content);
}
