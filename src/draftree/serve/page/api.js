/** Requests to the server that delivered the page. No other origin is contacted. */

import { eventsOf } from "./sse.js";

/** An error response, in words for the user. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, param?: string | null, code?: string | null, retryAfter?: string | null}} [details]
   */
  constructor(message, details = {}) {
    super(message);
    this.name = "ApiError";
    this.status = details.status ?? 0;
    this.param = details.param ?? null;
    this.code = details.code ?? null;
    this.retryAfter = details.retryAfter ?? null;
  }
}

/**
 * The error of a body in OpenAI's shape, or of anything else.
 *
 * @param {any} body parsed JSON, or undefined
 * @param {number} status
 * @param {string | null} [retryAfter] seconds
 * @returns {ApiError}
 */
export function errorFrom(body, status, retryAfter = null) {
  const found = body?.error ?? {};
  const message = typeof found === "string" ? found : found.message;
  return new ApiError(message || `The server answered with status ${status}.`, {
    status,
    param: found.param,
    code: found.code,
    retryAfter,
  });
}

/**
 * One sentence or more for the user: the message, the field at fault, and what to do.
 *
 * @param {unknown} error
 * @returns {string}
 */
export function wordsFor(error) {
  if (!(error instanceof ApiError)) {
    return error instanceof TypeError ? "The server cannot be reached. Check that it is running." : String(error);
  }
  const words = [sentence(error.message, error.param)];
  if (error.param && !error.message.includes(error.param)) words.push(`Field: ${error.param}.`);
  if (error.status === 401) words.push("Enter a valid API key in the settings.");
  if (error.retryAfter) words.push(`Try again in ${error.retryAfter} s.`);
  return words.join(" ");
}

/**
 * @param {string} text
 * @param {string | null} name of a field, which keeps its case
 */
function sentence(text, name) {
  const ended = /[.!?…]$/.test(text) ? text : `${text}.`;
  return name && text.startsWith(name) ? ended : ended[0].toUpperCase() + ended.slice(1);
}

/** Client of one server. */
export class Api {
  /**
   * @param {string} base URL of the page
   * @param {() => string} key returns the API key, "" for none
   */
  constructor(base, key) {
    this.base = base;
    this.key = key;
  }

  /** @returns {Record<string, string>} */
  #headers() {
    const key = this.key();
    return key ? { authorization: `Bearer ${key}` } : {};
  }

  /**
   * @param {string} path relative to the page
   * @param {RequestInit} [init]
   * @returns {Promise<Response>} with a status of 2xx
   */
  async #fetch(path, init = {}) {
    const url = new URL(path, this.base);
    const headers = { ...this.#headers(), ...init.headers };
    const response = await fetch(url, { cache: "no-store", credentials: "omit", ...init, headers });
    if (response.ok) return response;
    const body = await response.json().catch(() => undefined);
    throw errorFrom(body, response.status, response.headers.get("retry-after"));
  }

  /**
   * @param {string} path
   * @returns {Promise<any>}
   */
  async get(path) {
    return (await this.#fetch(path)).json();
  }

  /**
   * @param {string} path
   * @returns {Promise<string>}
   */
  async text(path) {
    return (await this.#fetch(path)).text();
  }

  /**
   * Chunks of a streamed completion.
   *
   * @param {string} path
   * @param {object} body
   * @param {AbortSignal} signal ends the request; the server then cancels it
   * @returns {AsyncGenerator<any>}
   */
  async *stream(path, body, signal) {
    const response = await this.#fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.body) throw new ApiError("The response has no body.");
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw errorFrom(chunk, response.status);
      yield chunk;
    }
  }
}
