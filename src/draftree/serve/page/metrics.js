/** Metrics of the server in Prometheus' text format: samples, sums, and rates between two readings. */

/** @typedef {{name: string, labels: Record<string, string>, value: number}} Sample */

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?$/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { n: "\n", '"': '"', "\\": "\\" };
const WORDS = { "+Inf": Infinity, "-Inf": -Infinity, NaN };

/** All samples of one reading. */
export class Reading {
  /**
   * @param {string} text
   * @param {number} timeMs when it was read
   */
  constructor(text, timeMs) {
    this.timeMs = timeMs;
    /** @type {Map<string, Sample[]>} */
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const found = line.startsWith("#") ? null : SAMPLE.exec(line.trim());
      if (!found) continue;
      const [, name, labels = "", value] = found;
      const sample = { name, labels: labelsOf(labels), value: WORDS[value] ?? Number(value) };
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push(sample);
    }
  }

  /**
   * Sum of the samples of a metric that have these labels; other labels, such as `draft` or `replica`, are summed over.
   *
   * @param {string} name
   * @param {Record<string, string>} [labels]
   * @returns {number | null} null if there is no such sample
   */
  sum(name, labels = {}) {
    const wanted = Object.entries(labels);
    const found = (this.samples.get(name) ?? []).filter((s) => wanted.every(([key, value]) => s.labels[key] === value));
    return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : null;
  }
}

/** @param {string} text */
function labelsOf(text) {
  const pairs = [...text.matchAll(LABEL)].map(([, name, value]) => [name, unescape(value)]);
  return Object.fromEntries(pairs);
}

/** @param {string} value */
function unescape(value) {
  return value.replace(/\\(.)/g, (whole, letter) => ESCAPES[letter] ?? whole);
}

/**
 * Increase of a counter. A counter that has no sample yet is 0; one that decreased belongs to a restarted server.
 *
 * @param {Reading | null} before
 * @param {Reading} now
 * @param {string} name
 * @param {Record<string, string>} [labels]
 * @returns {number | null} null without an earlier reading, and after a restart
 */
export function increase(before, now, name, labels) {
  if (!before) return null;
  const difference = (now.sum(name, labels) ?? 0) - (before.sum(name, labels) ?? 0);
  return difference < 0 ? null : difference;
}

/**
 * Load of a model.
 *
 * @typedef {object} Load
 * @property {number | null} running texts in the batch
 * @property {number | null} waiting texts before it
 * @property {number | null} tokensPerSecond
 * @property {number | null} requestsPerSecond finished requests
 * @property {number | null} accepted accepted share of the drafted tokens, 0 to 1; null if none were drafted
 * @property {number | null} perRound tokens written per round that had a draft; null if there was none
 */

/**
 * @param {Reading | null} before the reading before, null for none
 * @param {Reading} now
 * @param {string} model
 * @returns {Load} the rates are those between the two readings
 */
export function loadOf(before, now, model) {
  const labels = { model };
  const seconds = before ? (now.timeMs - before.timeMs) / 1000 : 0;
  const grown = (name) => increase(before, now, name, labels);
  const rate = (name) => (seconds > 0 && grown(name) !== null ? grown(name) / seconds : null);
  const drafts = grown("draftree_drafts_total");
  const [accepted, drafted] = [grown("draftree_accepted_tokens_total"), grown("draftree_draft_tokens_total")];
  return {
    running: now.sum("draftree_sequences_running", labels),
    waiting: now.sum("draftree_sequences_waiting", labels),
    tokensPerSecond: rate("draftree_generated_tokens_total"),
    requestsPerSecond: rate("draftree_request_seconds_count"),
    accepted: drafted && accepted !== null ? accepted / drafted : null,
    perRound: drafts && accepted !== null ? 1 + accepted / drafts : null,
  };
}
