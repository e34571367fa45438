/** The settings form: its fields are the state; models and drafters come from the server. */

import { byId, el } from "./dom.js";

const FIELDS = ["model", "draft", "temperature", "top_p", "max_tokens", "seed", "stop", "system", "format", "order"];
const KEY = "draftree-api-key";
/** Characters of a name that the field shows in the narrow column of wide screens. */
const FITS = 22;
const KINDS = { model: "model", draft: "drafter" };

/** Form of parameters. */
export class Settings {
  /** @type {{id: string, drafts: string[], sampling: Record<string, number>, supportsChat: boolean}[]} */
  #models = [];

  /**
   * @param {import("./state.js").State} state changed in place
   * @param {{onChange: () => void, onKey: () => void}} listeners
   */
  constructor(state, { onChange, onKey }) {
    this.state = state;
    byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
    for (const name of FIELDS) {
      byId(name).addEventListener("input", () => {
        state[name] = byId(name).value;
        if (name === "model") this.#fillDrafts();
        if (name in KINDS) showName(byId(name));
        onChange();
      });
    }
    const key = byId("key");
    key.value = sessionStorage.getItem(KEY) ?? "";
    key.addEventListener("change", () => {
      if (key.value) sessionStorage.setItem(KEY, key.value);
      else sessionStorage.removeItem(KEY);
      onKey();
    });
    if (!window.matchMedia("(max-width: 899px)").matches) return;
    for (const id of ["settings-box", "conversations-box"]) byId(id).open = false;
  }

  /** @returns {string} the API key, "" for none */
  static key() {
    return byId("key").value.trim();
  }

  /** Writes the state into the form. */
  show() {
    this.#fillModels();
    for (const name of FIELDS.slice(2)) byId(name).value = this.state[name];
    byId("compare-fields").hidden = this.state.mode !== "compare";
    byId("system-field").hidden = this.state.mode === "complete";
  }

  /** @returns {string} what is wrong with a number, "" for nothing */
  problem() {
    const wrong = [...document.querySelectorAll("#settings-form input[type=number]")].find(
      ({ validity }) => validity.badInput || validity.rangeUnderflow || validity.rangeOverflow,
    );
    if (!wrong) return "";
    const { labels, value, min, max } = wrong;
    const range = max ? `from ${min} to ${max}` : `of at least ${min}`;
    return `${labels[0].firstElementChild.textContent} must be a number ${range}${value && `, not ${value}`}.`;
  }

  /**
   * @param {import("./api.js").Api} api
   * @returns {Promise<string>} after the lists are filled: what of the state the server does not offer, "" for nothing
   */
  async load(api) {
    const [listed, status] = await Promise.all([
      api.get("v1/models"),
      api.get("draftree/status").catch(() => ({ models: [] })),
    ]);
    const named = (model) => [model.name, ...(model.aliases ?? [])].map((name) => [name, model]);
    const served = new Map(status.models.flatMap(named));
    this.#models = listed.data.map(({ id, supports_chat: supportsChat }) => {
      const { drafts = [], sampling = {} } = served.get(id) ?? {};
      return { id, drafts, sampling, supportsChat };
    });
    const wanted = { model: this.state.model, draft: this.state.draft };
    this.#fillModels();
    const missing = Object.entries(wanted).filter(([name, value]) => value !== "" && this.state[name] !== value);
    return missing.map(([name, value]) => `There is no ${KINDS[name]} “${value}”; the default is used.`).join(" ");
  }

  /** @returns {number} number of models that the server lists */
  get numModels() {
    return this.#models.length;
  }

  /** @returns {boolean} whether the selected model has a chat template */
  get supportsChat() {
    return this.#selected?.supportsChat ?? true;
  }

  get #selected() {
    return this.#models.find((model) => model.id === this.state.model);
  }

  #fillModels() {
    const names = this.#models.map((model) => model.id);
    if (!names.includes(this.state.model) && names.length) this.state.model = names[0];
    fill(byId("model"), names.length ? names.map((name) => [name, name]) : [["", "no model"]], this.state.model);
    this.#fillDrafts();
  }

  #fillDrafts() {
    const { drafts = [], sampling = {} } = this.#selected ?? {};
    byId("format").options[0].disabled = !this.supportsChat;
    if (!this.supportsChat) byId("format").value = this.state.format = "complete";
    for (const name of ["temperature", "top_p"]) byId(name).placeholder = `default (${sampling[name] ?? 1})`;
    const first = drafts.length ? `default (${drafts[0]})` : "default";
    const choices = [["", first], ...drafts.map((name) => [name, name]), ["none", "none (plain decoding)"]];
    const known = choices.some(([value]) => value === this.state.draft) || !this.#models.length;
    if (!known) this.state.draft = "";
    fill(byId("draft"), choices, this.state.draft);
  }
}

/**
 * @param {HTMLSelectElement} select
 * @param {string[][]} choices value and text
 * @param {string} chosen
 */
function fill(select, choices, chosen) {
  select.replaceChildren(...choices.map(([value, text]) => el("option", { value }, text)));
  select.value = chosen;
  showName(select);
}

/** Shows the selected text below the field if the field cuts it. @param {HTMLSelectElement} select */
function showName(select) {
  const [name, text] = [byId(`${select.id}-name`), select.selectedOptions[0]?.text ?? ""];
  name.textContent = text;
  name.hidden = text.length <= FITS;
}
