/** Streams one request into a text on the page, with its line of facts below. */

import { copyText, decimal, el } from "./dom.js";
import { PATHS, Run, follow } from "./run.js";
import { randomSeed, requestBody } from "./state.js";
import { TextView } from "./text.js";

/**
 * @typedef {object} Context
 * @property {import("./api.js").Api} api
 * @property {import("./state.js").State} state
 * @property {import("./inspector.js").Inspector} inspector
 * @property {import("./announcer.js").Announcer} announcer
 * @property {Map<string, number>} plainSpeeds tokens/s of the last plain run, by model
 * @property {(request: Request) => void} onWritten gets every finished request
 * @typedef {object} Request
 * @property {"chat" | "complete"} kind
 * @property {Record<string, any>} body
 * @property {Run} run
 */

/**
 * @param {import("./state.js").State} state
 * @returns {number} the seed of the settings, or a random one
 */
export function seedOf(state) {
  return state.seed.trim() === "" ? randomSeed() : Number(state.seed);
}

/**
 * @param {Context} context
 * @param {{kind: "chat" | "complete", host: HTMLElement, label: string, seed: number, draft?: string,
 *     messages?: {role: string, content: string}[], prompt?: string, isQuiet?: boolean}} options
 *     host gets the text; isQuiet leaves the side panel and the spoken output alone
 * @param {AbortSignal} signal
 * @returns {Promise<Run>}
 */
export async function write(context, options, signal) {
  const { api, state, inspector, announcer } = context;
  const { kind, host, label, seed, isQuiet } = options;
  const body = requestBody(state, options);
  const run = new Run({ isPlain: body.draft === "none", seed });
  const view = new TextView(label, (round, isByKey) => {
    inspector.follow(run, view);
    inspector.show(round, isByKey);
  });
  view.element.classList.add("running");
  host.append(view.element);
  if (!isQuiet) inspector.follow(run, view);
  const onPieces = (pieces) => {
    for (const piece of pieces) view.add(piece, piece.round);
    if (!isQuiet) announcer.stream(pieces.map((piece) => piece.text).join(""));
    inspector.updateSoon();
  };
  try {
    await follow({ api, path: PATHS[kind], body, run, signal, onPieces });
  } finally {
    view.element.classList.remove("running");
    if (!isQuiet) announcer.end();
    if (run.isPlain && run.status === "done" && run.speed) context.plainSpeeds.set(state.model, run.speed);
    if (run.status !== "failed") host.append(facts(run));
    context.onWritten({ kind, body, run });
    inspector.update();
  }
  return run;
}

/**
 * @param {Run} run
 * @returns {HTMLElement}
 */
function facts(run) {
  const ends = { stop: "end of text", length: "token limit", tool_calls: "tool call" };
  const end = run.status === "stopped" ? "stopped" : (ends[run.finishReason] ?? run.finishReason ?? "ended");
  const copy = el("button", { type: "button", class: "quiet" }, "Copy text");
  copy.addEventListener("click", async () => {
    copy.textContent = (await copyText(run.text)) ? "Copied" : "Not allowed here";
  });
  const words = [end, `${run.tokens} tokens`, `${decimal(run.speed)} tokens/s`, `seed ${run.seed}`];
  return el("p", { class: "meta" }, ...words.map((word) => el("span", {}, word)), copy);
}
