/** The side panel: speed, origins, the current round, acceptance by depth, and the planner's reason. */

import { depthBars } from "./chart.js";
import { byId, decimal, el } from "./dom.js";
import { acceptanceByDepth, describeRound, isTargetCut } from "./rounds.js";
import { legend } from "./text.js";
import { drawTree, treeTable } from "./tree.js";

/** Milliseconds between two redraws while a text streams. */
const REDRAW_MS = 120;

/** Panel of the run in view. */
export class Inspector {
  /** @type {import("./run.js").Run | null} */
  #run = null;
  /** @type {import("./rounds.js").Round | null} */
  #round = null;
  /** @type {import("./text.js").TextView | null} */
  #view = null;
  #drawnMs = 0;

  /**
   * @param {() => number | null} plainSpeed tokens/s of the last plain run, null if there was none
   * @param {import("./announcer.js").Announcer} announcer
   */
  constructor(plainSpeed, announcer) {
    this.plainSpeed = plainSpeed;
    this.announcer = announcer;
    byId("round-previous").addEventListener("click", () => this.#step(-1));
    byId("round-next").addEventListener("click", () => this.#step(1));
    this.clear();
  }

  /** Removes the run. */
  clear() {
    this.#run = null;
    this.#round = null;
    this.update();
    this.#drawRound();
  }

  /**
   * @param {import("./run.js").Run} run
   * @param {import("./text.js").TextView} view
   */
  follow(run, view) {
    if (this.#run === run) return;
    this.#run = run;
    this.#view = view;
    this.#round = null;
    this.update();
    this.#drawRound();
  }

  /**
   * Shows a round of the run.
   *
   * @param {import("./rounds.js").Round | null} round
   * @param {boolean} isSpoken whether screen readers get its description
   */
  show(round, isSpoken) {
    if (this.#round === round) return;
    this.#round = round;
    this.#drawRound();
    if (round && isSpoken) this.announcer.say(`Round ${round.number}. ${describeRound(round)}`);
  }

  /** Redraws numbers and charts, unless this was done a moment ago. */
  updateSoon() {
    if (performance.now() - this.#drawnMs > REDRAW_MS) this.update();
  }

  /** Redraws numbers and charts; without a round of the user's choice the last one is shown. */
  update() {
    this.#drawnMs = performance.now();
    const run = this.#run;
    this.#drawSpeed(run);
    byId("legend").replaceChildren(legend(run?.counts ?? {}));
    const rows = run ? acceptanceByDepth(run.log.rounds) : [];
    byId("depths").replaceChildren(rows.length ? depthBars(rows) : hint("Shown as soon as tokens are drafted."));
    byId("explain").textContent = explanation(run);
    this.#drawButtons();
    if (run && !this.#round) this.#drawRound();
  }

  /** @param {import("./run.js").Run | null} run */
  #drawSpeed(run) {
    const speed = run?.speed ?? null;
    const plain = run && !run.isPlain ? this.plainSpeed() : null;
    byId("speed").textContent = decimal(speed);
    byId("ratio").textContent = ratioWords(run, speed, plain);
    byId("measure-plain").hidden = !run || run.isPlain || run.status !== "done";
    const cells = {
      tokens: run ? String(run.tokens) : "–",
      rounds: run ? String(run.stats?.rounds ?? run.log.rounds.length) : "–",
      acceptance: run?.log.rounds.length || run?.stats ? decimal(run.acceptanceLength, 2) : "–",
      first: run?.firstMs === null || !run ? "–" : `${Math.round(run.firstMs)} ms`,
    };
    for (const [name, value] of Object.entries(cells)) byId(`stat-${name}`).textContent = value;
  }

  /** @param {number} step */
  #step(step) {
    const at = this.#shown();
    if (!this.#run || !at) return;
    const round = this.#run.log.rounds[at.number - 1 + step];
    if (!round) return;
    this.show(round, true);
    this.#view?.mark(round);
  }

  #shown() {
    return this.#round ?? this.#run?.log.rounds.at(-1) ?? null;
  }

  #drawButtons() {
    const at = this.#shown();
    const last = this.#run?.log.rounds.length ?? 0;
    byId("round-previous").disabled = !at || at.number <= 1;
    byId("round-next").disabled = !at || at.number >= last;
    byId("round-title").textContent = at ? `Round ${at.number} of ${last}` : "Round";
  }

  #drawRound() {
    const round = this.#shown();
    this.#drawButtons();
    byId("round-words").textContent = round
      ? describeRound(round)
      : "Send a prompt, then point at a word or press Tab and the arrow keys to see the round that wrote it.";
    byId("round-tree").replaceChildren(...(round ? [drawTree(round)] : []));
    byId("round-table").replaceChildren(...(round ? [treeTable(round)] : []));
    byId("round-details").hidden = !round;
    byId("key-cut").hidden = !round || !isTargetCut(round);
  }
}

/** @param {string} text */
function hint(text) {
  return el("p", { class: "hint" }, text);
}

function ratioWords(run, speed, plain) {
  if (!run) return "";
  if (run.isPlain) return "plain decoding";
  if (!plain) return "plain speed not measured yet";
  const words = `${decimal(plain)} tokens/s`;
  return speed ? `${decimal(speed / plain, 2)}× plain (${words})` : `plain: ${words}`;
}

function explanation(run) {
  if (!run) return "The planner’s reason for the size of its drafts appears after the first text.";
  if (run.isPlain) return "Plain decoding: one token per pass of the target, nothing is drafted.";
  if (run.explain) return run.explain;
  if (run.status === "running") return "Shown at the end of the text.";
  return "This planner gives no reason: its budget is fixed.";
}
