/** Comparison of one request with and without drafts: two texts, two speeds, one verdict. */

import { speedBars } from "./chart.js";
import { excerpt, verdict } from "./difference.js";
import { decimal, el } from "./dom.js";
import { withSystem } from "./state.js";
import { View } from "./view.js";
import { seedOf, write } from "./write.js";

const SIDES = [
  { name: "Plain", origin: "plain" },
  { name: "Drafted", origin: "drafted" },
];

const REPEATED =
  "This prompt was compared before. A drafter that keeps earlier answers, such as suffix, can copy them.";

/** View of the two sides. */
export class CompareView extends View {
  /** @type {Set<string>} prompts that were compared before */
  #sent = new Set();

  /** @param {import("./write.js").Context} context */
  constructor(context) {
    super(context, "comparison");
  }

  /**
   * @param {string} prompt
   * @param {AbortSignal} signal
   */
  async send(prompt, signal) {
    const { state } = this.context;
    const seed = seedOf(state);
    const wasSent = this.#sent.has(prompt);
    this.#sent.add(prompt);
    const cards = SIDES.map(({ name }) => el("article", { class: "panel card side" }, el("h2", {}, name)));
    const result = el("div", { class: "panel verdict" }, el("strong", {}, "Writing…"));
    const echo = el("p", { class: "prompt-echo" }, prompt);
    this.host.replaceChildren(echo, result, el("div", { class: "sides" }, ...cards));
    const drafter = state.draft === "none" ? "" : state.draft;
    const start = (side) => {
      const draft = side === 0 ? "none" : drafter;
      const options = { kind: state.format, host: cards[side], label: `${SIDES[side].name} text`, seed, draft };
      const content = state.format === "chat" ? { messages: this.#messages(prompt) } : { prompt };
      return write(this.context, { ...options, ...content, isQuiet: side === 0 }, signal);
    };
    try {
      const runs = await this.#both(start, signal);
      this.#conclude(result, runs);
      if (wasSent) result.append(el("p", { class: "hint" }, REPEATED));
    } catch (error) {
      result.replaceChildren(el("strong", {}, "No verdict: a request failed"));
      throw error;
    }
  }

  #messages(prompt) {
    return withSystem(this.context.state, [{ role: "user", content: prompt }]);
  }

  /**
   * Plain decoding comes second: otherwise a drafter that keeps earlier answers could copy its text.
   *
   * @param {(side: number) => Promise<import("./run.js").Run>} start
   * @param {AbortSignal} signal
   * @returns {Promise<(import("./run.js").Run | null)[]>} the plain and the drafted run; null for one not started
   */
  async #both(start, signal) {
    if (this.context.state.order === "together") return Promise.all([start(0), start(1)]);
    const drafted = await start(1);
    return [signal.aborted ? null : await start(0), drafted];
  }

  /**
   * @param {HTMLElement} result
   * @param {(import("./run.js").Run | null)[]} runs
   */
  #conclude(result, runs) {
    const [plain, drafted] = runs;
    const isComplete = runs.every((run) => run?.status === "done");
    const { kind, title, index } = verdict(plain?.text ?? "", drafted.text, isComplete);
    result.className = `panel verdict ${kind}`;
    result.replaceChildren(el("strong", {}, title));
    if (kind === "different") {
      result.append(side("Plain", plain.text, index), side("Drafted", drafted.text, index));
    }
    if (!plain) return;
    const speeds = SIDES.map(({ name, origin }, i) => ({ name, origin, speed: runs[i].speed }));
    result.append(el("p", {}, ratioWords(speeds, this.context.state.order)), speedBars(speeds));
    this.context.announcer.say(title);
  }
}

/**
 * @param {string} name
 * @param {string} text
 * @param {number} index of the first difference
 */
function side(name, text, index) {
  return el("p", {}, `${name}: `, el("code", {}, excerpt(text, index)));
}

function ratioWords([plain, drafted], order) {
  if (!plain.speed || !drafted.speed) return "Too few tokens to measure a speed.";
  const words = `Drafted decoding ran at ${decimal(drafted.speed / plain.speed, 2)}× the speed of plain decoding.`;
  return order === "together" ? `${words} Both ran at once and shared the machine.` : words;
}
