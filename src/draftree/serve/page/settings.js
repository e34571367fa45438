/** The settings form: its fields are the state; models and drafters come from the server. */

import { byId, el } from "./dom.js";

const FIELDS = ["model", "draft", "temperature", "top_p", "max_tokens", "seed", "stop", "system", "format", "order"];
const KEY = "draftree-api-key";
const KINDS = { model: "model", draft: "drafter" };

/** Form of parameters. */
export class Settings {
  /** @type {{id: string, drafts: string[], sampling: Record<string, number>}[]} */
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
    if (window.matchMedia("(max-width: 899px)").matches) byId("settings-box").open = false;
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
    this.#models = listed.data.map(({ id }) => {
      const { drafts = [], sampling = {} } = served.get(id) ?? {};
      return { id, drafts, sampling };
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

  #fillModels() {
    const names = this.#models.map((model) => model.id);
    if (!names.includes(this.state.model) && names.length) this.state.model = names[0];
    fill(byId("model"), names.length ? names.map((name) => [name, name]) : [["", "no model"]], this.state.model);
    this.#fillDrafts();
  }

  #fillDrafts() {
    const { drafts = [], sampling = {} } = this.#models.find((model) => model.id === this.state.model) ?? {};
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
}
