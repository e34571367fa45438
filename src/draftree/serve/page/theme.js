/** Light, dark, or as the system prefers. The choice is kept in this browser. */

import { byId } from "./dom.js";

const NAME = "draftree-theme";
const CHOICES = ["auto", "light", "dark"];

/** Connects the theme button. */
export function setUpTheme() {
  const button = byId("theme");
  const apply = (choice) => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.dataset.choice = choice;
    button.querySelector("span").textContent = `Theme: ${choice}`;
  };
  let choice = localStorage.getItem(NAME) ?? "auto";
  if (!CHOICES.includes(choice)) choice = "auto";
  apply(choice);
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    localStorage.setItem(NAME, choice);
    apply(choice);
  });
}
