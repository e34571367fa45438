/** Keeps the end of the text in view while it streams, until the user scrolls up. */

import { byId } from "./dom.js";

/** Pixels below the window that still count as the end. */
const SLACK = 40;
const MARGIN = 12;

/** Scrolls the window with the growth of the main column. */
export class Following {
  #isStreaming = false;
  #isFollowing = false;
  #lastY = window.scrollY;
  #main = byId("main");
  #button = byId("to-latest");

  /** @param {() => boolean} hasText whether the view in front holds a text */
  constructor(hasText) {
    this.hasText = hasText;
    window.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    new ResizeObserver(() => this.#grown()).observe(this.#main);
    this.#button.addEventListener("click", () => this.#jump());
  }

  /** Begins to follow a new text. */
  start() {
    this.#isStreaming = true;
    this.#jump();
  }

  /** Ends with the text; what was added last is still shown. */
  stop() {
    this.#grown();
    this.#isStreaming = false;
  }

  #jump() {
    this.#isFollowing = true;
    window.scrollBy({ top: Math.max(0, this.#below()), behavior: "instant" });
    this.update();
  }

  /** Shows or hides the button. */
  update() {
    this.#button.hidden = !this.hasText() || this.#below() <= SLACK;
  }

  /** @returns {number} pixels of the main column below the window */
  #below() {
    return this.#main.getBoundingClientRect().bottom + MARGIN - window.innerHeight;
  }

  #grown() {
    if (this.#isStreaming && this.#isFollowing) this.#jump();
    else this.update();
  }

  #scrolled() {
    if (this.#below() <= SLACK) this.#isFollowing = true;
    else if (window.scrollY < this.#lastY) this.#isFollowing = false;
    this.#lastY = window.scrollY;
    this.update();
  }
}
