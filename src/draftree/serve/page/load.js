/** Load of the server: running and waiting requests, speed and acceptance of every model, polled while in view. */

import { sparkline } from "./chart.js";
import { byId, decimal, el } from "./dom.js";
import { wordsFor } from "./api.js";

const POLL_MS = 1500;
const SAMPLES = 80;

/**
 * A status value as text.
 *
 * @param {unknown} value
 * @returns {string}
 */
export function shown(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : decimal(value, 2);
  return Array.isArray(value) ? value.join(", ") || "–" : String(value);
}

/**
 * @param {number} seconds
 * @returns {string} such as "2 h 5 min"
 */
export function duration(seconds) {
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

/** @typedef {{speed: number, requests: number}} Sample tokens/s; running and waiting requests */

/** Polls `/draftree/status`. */
export class LoadView {
  /** @type {Map<string, Sample[]>} by model, oldest first */
  #samples = new Map();
  #host = byId("load");
  #isOpen = false;

  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.api = api;
  }

  /** Starts polling. */
  open() {
    if (this.#isOpen) return;
    this.#isOpen = true;
    this.#poll();
  }

  /** Stops polling. */
  close() {
    this.#isOpen = false;
  }

  async #poll() {
    while (this.#isOpen) {
      if (!document.hidden) await this.#refresh();
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  async #refresh() {
    try {
      const status = await this.api.get("draftree/status");
      for (const model of status.models) this.#sample(model);
      this.#draw(status);
    } catch (error) {
      this.#host.replaceChildren(el("p", { class: "alert", role: "alert" }, wordsFor(error)));
    }
  }

  /** @param {any} model */
  #sample(model) {
    const values = this.#samples.get(model.name) ?? [];
    values.push({ speed: model.tokens_per_second ?? 0, requests: (model.running ?? 0) + (model.waiting ?? 0) });
    this.#samples.set(model.name, values.slice(-SAMPLES));
  }

  /** @param {any} status */
  #draw(status) {
    const numbers = Object.entries(status.queue ?? {}).filter(([, value]) => typeof value !== "object");
    const queue = numbers.map(([name, value]) => [sentenceCase(name), shown(value)]);
    const tiles = [...queue, ["Up", duration(status.uptime_seconds ?? 0)], ["Version", shown(status.version)]];
    this.#host.replaceChildren(
      el("section", { class: "panel card served" }, el("h2", {}, "Queue"), tileList(tiles)),
      ...status.models.map((model) => this.#card(model)),
    );
  }

  /** @param {string} name of a model */
  #history(name) {
    const samples = this.#samples.get(name) ?? [];
    const figure = (values, label) => el("figure", {}, sparkline(values, label), el("figcaption", {}, label));
    const speeds = samples.map((sample) => sample.speed);
    const requests = samples.map((sample) => sample.requests);
    const figures = [figure(speeds, "Tokens/s"), figure(requests, "Running and waiting requests")];
    return el("div", { class: "history" }, ...figures);
  }

  /** @param {any} model */
  #card(model) {
    const rate = model.acceptance_rate;
    const tiles = [
      ["Running", shown(model.running)],
      ["Waiting", shown(model.waiting)],
      ["Tokens/s", decimal(model.tokens_per_second)],
      ["Tokens per round", decimal(model.acceptance_length, 2)],
      ["Drafts accepted", rate === null || rate === undefined ? "–" : `${Math.round(rate * 100)} %`],
    ];
    const facts = ["drafts", "context", "kernels", "dtype"].map((name) => `${name}: ${shown(model[name])}`);
    return el(
      "section",
      { class: "panel card served" },
      el("h2", {}, model.name),
      tileList(tiles),
      this.#history(model.name),
      el("p", { class: "meta" }, ...facts.map((fact) => el("span", {}, fact))),
      el("p", { class: "words" }, model.explain || "The planner has not given a reason yet."),
    );
  }
}

/** @param {string} name such as "max_waiting" */
function sentenceCase(name) {
  return name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");
}

/** @param {string[][]} tiles name and value */
function tileList(tiles) {
  const cells = tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("dl", { class: "tiles" }, ...cells);
}
