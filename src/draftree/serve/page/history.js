/** The list of conversations: opens, deletes, begins and exports them. */

import { asJson, asMarkdown, download, forget, keptConversations, titleOf } from "./conversations.js";
import { button, byId, el } from "./dom.js";

/** Panel of the kept conversations. */
export class History {
  /**
   * @param {import("./chat.js").ChatView} chat
   * @param {{onOpen: (id: string | null) => void, system: () => string}} options onOpen gets the conversation to show,
   *     null for a new one; system returns the system prompt, which exported files begin with
   */
  constructor(chat, { onOpen, system }) {
    this.chat = chat;
    this.onOpen = onOpen;
    byId("new-conversation").addEventListener("click", () => onOpen(null));
    byId("export-markdown").addEventListener("click", () => this.#export("md", "text/markdown", asMarkdown, system()));
    byId("export-json").addEventListener("click", () => this.#export("json", "application/json", asJson, system()));
    window.addEventListener("storage", () => this.show()); // another tab has kept or deleted one
  }

  /** Draws the list. */
  show() {
    const { id, turns } = this.chat.conversation;
    const items = keptConversations().map((conversation) => {
      const title = titleOf(conversation);
      const when = new Date(conversation.time).toLocaleString();
      const open = button(title, () => this.onOpen(conversation.id), "conversation");
      open.append(el("small", {}, `${when}, ${conversation.model}`));
      if (conversation.id === id) open.setAttribute("aria-current", "true");
      const remove = button("Delete", () => this.#delete(conversation), "remove");
      remove.setAttribute("aria-label", `Delete “${title}”`);
      return el("li", {}, open, remove);
    });
    byId("conversations").replaceChildren(...items);
    byId("no-conversations").hidden = items.length > 0;
    for (const name of ["export-markdown", "export-json"]) byId(name).disabled = turns.length === 0;
  }

  /** @param {import("./conversations.js").Conversation} conversation */
  #delete(conversation) {
    if (!window.confirm(`Delete “${titleOf(conversation)}”?`)) return;
    forget(conversation.id);
    if (conversation.id === this.chat.conversation.id) this.onOpen(null);
    else this.show();
  }

  #export(suffix, type, format, system) {
    const { conversation } = this.chat;
    const day = new Date(conversation.time).toISOString().slice(0, 10);
    download(`draftree-${day}.${suffix}`, type, format(conversation, system.trim()));
  }
}
