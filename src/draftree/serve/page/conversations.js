/** Conversations kept in this browser, newest first, and their export as files. */

import { el } from "./dom.js";
import { randomSeed } from "./state.js";

const NAME = "draftree-conversations";
export const MAX_KEPT = 50;
/** Characters of all kept conversations together; browsers keep about five million of one address. */
export const MAX_CHARS = 1_000_000;
const TITLE_CHARS = 60;

/**
 * @typedef {{role: "user" | "assistant", content: string}} Turn
 * @typedef {{id: string, time: number, model: string, turns: Turn[]}} Conversation time: start, in milliseconds since
 *     1970; model: of the last answer
 */

/** @returns {Conversation} an empty one */
export function newConversation() {
  const time = Date.now();
  return { id: `${time}-${randomSeed()}`, time, model: "", turns: [] };
}

/**
 * @param {string | null} text as kept
 * @returns {Conversation[]} those that are well formed
 */
export function readConversations(text) {
  let kept;
  try {
    kept = JSON.parse(text ?? "[]");
  } catch {
    return [];
  }
  const isTurn = (turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string";
  const isWhole = (one) =>
    typeof one?.id === "string" && Number.isFinite(one.time) && typeof one.model === "string" &&
    Array.isArray(one.turns) && one.turns.every(isTurn);
  return Array.isArray(kept) ? kept.filter(isWhole) : [];
}

/**
 * @param {Conversation[]} conversations newest first
 * @returns {Conversation[]} the newest ones, within both limits
 */
export function withinLimits(conversations) {
  let chars = 0;
  return conversations.slice(0, MAX_KEPT).filter((one) => {
    chars += one.turns.reduce((sum, turn) => sum + turn.content.length, 0);
    return chars <= MAX_CHARS;
  });
}

/** @returns {Conversation[]} */
export function keptConversations() {
  try {
    return readConversations(localStorage.getItem(NAME));
  } catch {
    return []; // the browser forbids storage
  }
}

/**
 * Keeps a conversation as the newest one. Older ones are dropped where the limits demand it.
 *
 * @param {Conversation} conversation
 * @returns {boolean} whether it is kept: not if it exceeds the limits alone or the browser refuses
 */
export function keep(conversation) {
  const others = keptConversations().filter((one) => one.id !== conversation.id);
  const kept = withinLimits([conversation, ...others]);
  return write(kept) && kept[0] === conversation;
}

/** @param {string} id of the conversation to delete */
export function forget(id) {
  write(keptConversations().filter((one) => one.id !== id));
}

/** @param {Conversation[]} conversations */
function write(conversations) {
  try {
    localStorage.setItem(NAME, JSON.stringify(conversations));
    return true;
  } catch {
    return false;
  }
}

/** @param {Conversation} conversation @returns {string} the beginning of the first message in one line */
export function titleOf(conversation) {
  const line = (conversation.turns[0]?.content ?? "").trim().replace(/\s+/g, " ");
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS)}…` : line;
}

/**
 * @param {Conversation} conversation
 * @param {string} system prompt, "" for none
 * @returns {string}
 */
export function asMarkdown(conversation, system) {
  const names = { user: "You", assistant: conversation.model || "Model" };
  const parts = conversation.turns.map(({ role, content }) => `## ${names[role]}\n\n${content}\n`);
  return [...(system ? [`## System\n\n${system}\n`] : []), ...parts].join("\n");
}

/**
 * @param {Conversation} conversation
 * @param {string} system prompt, "" for none
 * @returns {string} a body for `/v1/chat/completions`
 */
export function asJson({ model, turns }, system) {
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
  return `${JSON.stringify({ model, messages }, null, 2)}\n`;
}

/** Lets the browser save a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
