/** Streams one request into a text on the page, with its line of facts below. */

import { button, decimal, el } from "./dom.js";
import { PATHS, Run, follow } from "./run.js";
import { randomSeed, requestBody } from "./state.js";
import { TextView, copyButton } from "./text.js";

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
 *     messages?: {role: string, content: string}[], prompt?: string, isQuiet?: boolean,
 *     isMarkdown?: boolean}} options host gets the text; isQuiet leaves the side panel and the spoken output alone
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
  }, options.isMarkdown);
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
    view.finish();
    if (!isQuiet) announcer.end();
    if (run.isPlain && run.status === "done" && run.speed) context.plainSpeeds.set(state.model, run.speed);
    if (run.status !== "failed") host.append(facts(run, view));
    context.onWritten({ kind, body, run });
    inspector.update();
  }
  return run;
}

/**
 * @param {Run} run
 * @param {TextView} view
 * @returns {HTMLElement}
 */
function facts(run, view) {
  const ends = { stop: "end of text", length: "token limit", tool_calls: "tool call" };
  const end = run.status === "stopped" ? "stopped" : (ends[run.finishReason] ?? run.finishReason ?? "ended");
  const words = [end, `${run.tokens} tokens`, `${decimal(run.speed)} tokens/s`, `seed ${run.seed}`];
  return el("p", { class: "meta" }, ...words.map((word) => el("span", {}, word)), ...textActions(view));
}

/**
 * @param {TextView} view
 * @returns {HTMLElement[]} buttons that copy the text and, if it is Markdown, show it as written
 */
export function textActions(view) {
  const copy = copyButton(() => view.source, "Copy text");
  if (!view.isMarkdown) return [copy];
  const source = button("Show source", () => {
    view.show(!view.isMarkdown);
    source.textContent = view.isMarkdown ? "Show source" : "Show formatted";
  });
  return [copy, source];
}
