/** Prompts to start with, and the buttons that put them into the composer. */

import { byId, el } from "./dom.js";

const CODE = `class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def subtract(self, other):`;

const EXAMPLES = {
  chat: [
    ["Explain a cache", "Explain in a few sentences what a cache is and why it makes programs faster."],
    ["Count to thirty", "Count from one to thirty in words, separated by commas."],
    ["Repeat a list", "Repeat this list, one name per line: Ada, Alan, Barbara, Donald, Edsger, Grace, John."],
  ],
  complete: [
    ["A story", "Once upon a time, a small robot found a garden at the end of the street."],
    ["Python code", CODE],
  ],
};

/** @param {(prompt: string) => void} onChoose */
export function setUpExamples(onChoose) {
  for (const [host, name] of [["chat", "chat"], ["complete", "complete"], ["compare", "chat"]]) {
    const buttons = EXAMPLES[name].map(([title, prompt]) => {
      const button = el("button", { type: "button", class: "quiet" }, title);
      button.addEventListener("click", () => onChoose(prompt));
      return button;
    });
    byId(`${host}-examples`).replaceChildren(...buttons);
  }
}
