/** One streamed request: its text, its rounds, and its speed while it runs. */

import { RoundLog } from "./rounds.js";

/** Paths of the two kinds of request, relative to the page. */
export const PATHS = { chat: "v1/chat/completions", complete: "v1/completions" };

/** State of one request. `onChange` listeners are called after every chunk. */
export class Run {
  log = new RoundLog();
  text = "";
  /** @type {Record<string, number>} pieces by origin */
  counts = { drafted: 0, target: 0, plain: 0 };
  explain = "";
  /** @type {any} statistics of the server, after the end */
  stats = null;
  /** @type {any} */
  usage = null;
  /** @type {string | null} */
  finishReason = null;
  /** @type {"running" | "done" | "stopped" | "failed"} */
  status = "running";
  /** @type {number | null} milliseconds until the first text */
  firstMs = null;

  /**
   * @param {{isPlain: boolean, seed: number, now?: () => number}} options now returns milliseconds
   */
  constructor({ isPlain, seed, now = () => performance.now() }) {
    this.isPlain = isPlain;
    this.seed = seed;
    this.now = now;
    this.startMs = now();
    this.lastMs = this.startMs;
    this.firstTokens = 0;
  }

  /** @returns {number} tokens so far */
  get tokens() {
    const pieces = this.counts.drafted + this.counts.target + this.counts.plain;
    return this.usage?.completion_tokens ?? (this.log.tokens || pieces);
  }

  /** @returns {number | null} tokens/s after the first chunk: the server's measure after the end, ours before */
  get speed() {
    if (this.stats) return this.stats.tokens_per_second;
    const seconds = (this.lastMs - this.startMs - (this.firstMs ?? 0)) / 1000;
    return this.firstMs === null || seconds <= 0 ? null : (this.tokens - this.firstTokens) / seconds;
  }

  /** @returns {number | null} tokens per round */
  get acceptanceLength() {
    const rounds = this.stats?.rounds ?? this.log.rounds.length;
    return rounds ? this.tokens / rounds : null;
  }

  /**
   * @param {any} chunk of the stream
   * @returns {import("./rounds.js").Piece[]} its new pieces, each with its round in `round`
   */
  take(chunk) {
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    this.text += text;
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    this.usage = chunk.usage ?? this.usage;
    const extra = chunk.draftree ?? {};
    for (const round of extra.rounds ?? []) this.log.add(round);
    if (extra.explain) this.explain = extra.explain;
    if (extra.stats) this.stats = Array.isArray(extra.stats) ? extra.stats[0] : extra.stats;
    if (chunk.usage && !choice) this.log.close(chunk.usage.completion_tokens);
    const pieces = extra.pieces ?? (text ? [{ text, origin: "plain" }] : []);
    for (const piece of pieces) this.counts[piece.origin] += 1;
    if (pieces.length) this.#measure();
    return pieces.map((piece) => ({ ...piece, round: this.log.roundOf(piece) }));
  }

  #measure() {
    this.lastMs = this.now();
    if (this.firstMs !== null) return;
    this.firstMs = this.lastMs - this.startMs;
    this.firstTokens = this.tokens;
  }
}

/**
 * Streams a request into a run.
 *
 * @param {{api: import("./api.js").Api, path: string, body: object, run: Run, signal: AbortSignal,
 *     onPieces: (pieces: any[]) => void}} request
 * @returns {Promise<void>} after the end or after the signal
 * @throws errors of the server; the status of the run is then "failed"
 */
export async function follow({ api, path, body, run, signal, onPieces }) {
  try {
    for await (const chunk of api.stream(path, body, signal)) onPieces(run.take(chunk));
    run.status = "done";
  } catch (error) {
    run.status = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) throw error;
  }
}
