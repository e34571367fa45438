/** Load of the server from its metrics: queue, and requests, speed and acceptance of every model, while in view. */

import { sparkline } from "./chart.js";
import { byId, decimal, el } from "./dom.js";
import { ApiError, wordsFor } from "./api.js";
import { Reading, loadOf } from "./metrics.js";

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

/**
 * @typedef {import("./metrics.js").Load} Load
 * @typedef {{timeMs: number, speed: number, requests: number}} Point tokens/s; running and waiting texts
 */

/** Polls `/metrics`, and `/draftree/status` for facts that are no numbers. */
export class LoadView {
  /** @type {Map<string, Point[]>} by model, oldest first */
  #points = new Map();
  /** @type {Reading | null} */
  #before = null;
  #host = byId("load");
  #trouble = el("p", { class: "alert", role: "alert", hidden: true });
  #cards = el("div", { class: "cards" });
  #isOpen = false;

  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.api = api;
    this.#host.append(this.#trouble, this.#cards);
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
    this.#before = null;
  }

  async #poll() {
    while (this.#isOpen) {
      if (!document.hidden) await this.#refresh();
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  async #refresh() {
    const [status, metrics] = await Promise.allSettled([this.api.get("draftree/status"), this.#read()]);
    if (!this.#isOpen) return;
    this.#show(troubleOf(status.reason, metrics.reason));
    if (status.status === "rejected") {
      this.#cards.replaceChildren();
      this.#before = null;
      return;
    }
    const now = metrics.status === "fulfilled" ? metrics.value : null;
    const { models } = status.value;
    const loads = new Map(models.map(({ name }) => [name, now && loadOf(this.#before, now, name)]));
    if (this.#before) for (const [name, load] of loads) this.#note(name, load);
    this.#before = now;
    this.#draw(status.value, now, loads);
  }

  /** @returns {Promise<Reading>} */
  async #read() {
    const text = await this.api.text("metrics");
    return new Reading(text, performance.now());
  }

  /** @param {string} words "" for none; an unchanged message is not announced again */
  #show(words) {
    if (this.#trouble.textContent !== words) this.#trouble.textContent = words;
    this.#trouble.hidden = words === "";
  }

  /**
   * @param {string} name of a model
   * @param {Load | null} load
   */
  #note(name, load) {
    if (!load) return;
    const points = this.#points.get(name) ?? [];
    const requests = (load.running ?? 0) + (load.waiting ?? 0);
    points.push({ timeMs: performance.now(), speed: load.tokensPerSecond ?? 0, requests });
    this.#points.set(name, points.slice(-SAMPLES));
  }

  /**
   * @param {any} status
   * @param {Reading | null} now
   * @param {Map<string, Load | null>} loads by model
   */
  #draw(status, now, loads) {
    const limit = (name) => (Number.isFinite(status.queue?.[name]) ? ` of ${status.queue[name]}` : "");
    const gauge = (name) => shown(now?.sum(`draftree_${name}`) ?? null);
    const sum = (name, digits) => decimal(total([...loads.values()].map((load) => load?.[name] ?? null)), digits);
    const tiles = [
      ["Running requests", gauge("requests_running")],
      ["Places taken", gauge("places_taken") + limit("max_places")],
      ["Waiting requests", gauge("requests_waiting") + limit("max_waiting")],
      ["Tokens/s", sum("tokensPerSecond", 1)],
      ["Requests/s", sum("requestsPerSecond", 2)],
      ["Up", duration(status.uptime_seconds ?? 0)],
      ["Version", shown(status.version)],
    ];
    this.#cards.replaceChildren(
      el("section", { class: "panel card served" }, el("h2", {}, "Queue"), tileList(tiles)),
      ...status.models.map((model) => this.#card(model, loads.get(model.name) ?? null)),
    );
  }

  /** @param {string} name of a model */
  #history(name) {
    const points = this.#points.get(name) ?? [];
    const seconds = points.length ? (performance.now() - points[0].timeMs) / 1000 : 0;
    const speeds = points.map((point) => point.speed);
    const requests = points.map((point) => point.requests);
    const figures = [
      sparkline(speeds, { label: "Speed", unit: "tokens/s", seconds }),
      sparkline(requests, { label: "Running and waiting", unit: "texts", seconds }),
    ];
    return el("div", { class: "history" }, ...figures);
  }

  /**
   * @param {any} model
   * @param {Load | null} load
   */
  #card(model, load) {
    const accepted = load?.accepted ?? null;
    const tiles = [
      ["Running texts", shown(load?.running)],
      ["Waiting texts", shown(load?.waiting)],
      ["Tokens/s", decimal(load?.tokensPerSecond)],
      ["Requests/s", decimal(load?.requestsPerSecond, 2)],
      ["Tokens per drafted round", decimal(load?.perRound, 2)],
      ["Drafts accepted", accepted === null ? "–" : `${Math.round(accepted * 100)} %`],
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

/**
 * @param {unknown} status error of the status, if any
 * @param {unknown} metrics error of the metrics, if any
 * @returns {string}
 */
function troubleOf(status, metrics) {
  if (status) return wordsFor(status);
  if (!metrics) return "";
  const refusal = metrics instanceof ApiError ? `/metrics was refused with status ${metrics.status}. ` : "";
  return `The load is not known. ${refusal}${wordsFor(metrics)}`;
}

/** @param {(number | null)[]} values @returns {number | null} null if none is known */
function total(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

/** @param {string[][]} tiles name and value */
function tileList(tiles) {
  const cells = tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("dl", { class: "tiles" }, ...cells);
}
