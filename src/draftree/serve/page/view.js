/** Base class of the views of the prompt: chat, completion and comparison. */

import { byId } from "./dom.js";

/** A view with an element that holds what was written. */
export class View {
  /**
   * @param {import("./write.js").Context} context
   * @param {string} id of the element
   */
  constructor(context, id) {
    this.context = context;
    this.host = byId(id);
  }

  /** @returns {boolean} whether nothing was written */
  get isEmpty() {
    return this.host.childElementCount === 0;
  }

  /** Removes what was written. */
  clear() {
    this.host.replaceChildren();
  }
}
