/** State of the page that a link can share: mode, parameters and prompt. The API key is never part of it. */

/**
 * @typedef {object} State
 * @property {string} mode "chat", "complete", "compare" or "load"
 * @property {string} model name of a served model; "" for the first
 * @property {string} draft name of a drafter, "none" for plain decoding; "" for the server's default
 * @property {string} temperature "" for the model's default
 * @property {string} top_p "" for the model's default
 * @property {string} max_tokens
 * @property {string} seed "" for a random one
 * @property {string} stop one string per line
 * @property {string} system
 * @property {string} prompt
 * @property {string} format of compared requests: "chat" or "complete"
 * @property {string} order of compared requests: "sequence" or "together"
 */

/** @type {Readonly<State>} */
export const DEFAULTS = Object.freeze({
  mode: "chat",
  model: "",
  draft: "",
  temperature: "",
  top_p: "",
  max_tokens: "256",
  seed: "",
  stop: "",
  system: "",
  prompt: "",
  format: "chat",
  order: "sequence",
});

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const ALLOWED = {
  mode: ["chat", "complete", "compare", "load"],
  format: ["chat", "complete"],
  order: ["sequence", "together"],
};

/**
 * @param {State} state
 * @returns {string} the fragment without "#"; values equal to the default are left out
 */
export function encodeState(state) {
  const params = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) {
    if (state[name] !== DEFAULTS[name]) params.set(name, state[name]);
  }
  return params.toString();
}

/**
 * @param {string} fragment with or without "#"; unknown names, invalid choices and what is no number are dropped
 * @returns {State}
 */
export function decodeState(fragment) {
  const state = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    if (NUMBERS.includes(name) && !/^(-?\d+(\.\d+)?(e[+-]?\d+)?)?$/i.test(value)) continue;
    if (!Object.hasOwn(ALLOWED, name) || ALLOWED[name].includes(value)) state[name] = value;
  }
  return state;
}

/**
 * @param {string} text one stop string per line; \n and \t are escapes
 * @returns {string[]}
 */
export function stopStrings(text) {
  const escapes = { n: "\n", t: "\t", "\\": "\\" };
  return text
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\([nt\\])/g, (_, letter) => escapes[letter]));
}

/** @returns {number} a seed of 31 bits */
export function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}

/**
 * Body of a streamed request with pieces and rounds.
 *
 * @param {State} state
 * @param {{seed: number, draft?: string, messages?: {role: string, content: string}[], prompt?: string}} request
 *     messages for a chat request, prompt for a completion; draft replaces the state's
 * @returns {Record<string, unknown>}
 */
export function requestBody(state, request) {
  const body = { model: state.model, seed: request.seed, stream: true, stream_options: { include_usage: true } };
  if (request.messages) body.messages = request.messages;
  else body.prompt = request.prompt;
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    if (state[name].trim() !== "") body[name] = Number(state[name]);
  }
  const stop = stopStrings(state.stop);
  if (stop.length) body.stop = stop;
  const draft = request.draft ?? state.draft;
  if (draft) body.draft = draft;
  body.draftree = { pieces: true, rounds: true };
  return body;
}

/**
 * @param {State} state
 * @param {{role: string, content: string}[]} history
 * @returns {{role: string, content: string}[]} the system prompt, if any, then the conversation
 */
export function withSystem(state, history) {
  const system = state.system.trim();
  return system ? [{ role: "system", content: system }, ...history] : [...history];
}
