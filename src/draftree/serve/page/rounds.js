/** Rounds of a text: which round wrote a piece, and counts over rounds. */

/**
 * @typedef {{id: number, text: string, parent: number, accepted: boolean, sources?: string[]}} TreeNode
 * @typedef {{id: number, text: string}} Token
 * @typedef {{index: number, position: number, nodes: TreeNode[], bonus: Token | null, target_tokens?: Token[] | null,
 *     number?: number, root?: string, written?: number}} Round
 *     target_tokens: the target token at the root, then at every node; empty or null if unknown
 *     written: tokens of the round in the text, known for the last one only; the end of the text cuts off the others
 * @typedef {{index?: number, text: string, origin: "drafted" | "target" | "plain"}} Piece
 */

/** Tokens without text of their own that may precede the one that completes a character. */
const LOOK_AHEAD = 8;

/** Rounds in order of arrival, and the tokens that they wrote. */
export class RoundLog {
  /** @type {Round[]} */
  rounds = [];
  /** @type {{text: string, drafted: boolean, round: Round}[]} */
  #unshown = [];
  #lastText = "";

  /** @param {Round} round as received */
  add(round) {
    const numbered = { ...round, number: this.rounds.length + 1, root: this.#lastText };
    this.rounds.push(numbered);
    const written = round.nodes.filter((node) => node.accepted).map((node) => ({ text: node.text, drafted: true }));
    if (round.bonus) written.push({ text: round.bonus.text, drafted: false });
    for (const token of written) this.#unshown.push({ ...token, round: numbered });
    if (written.length) this.#lastText = written[written.length - 1].text;
    return numbered;
  }

  /**
   * The round that wrote a piece. Pieces come in order, one per token; tokens that complete no character have none.
   *
   * @param {Piece} piece
   * @returns {Round | null} null if no rounds were received
   */
  roundOf(piece) {
    const drafted = piece.origin === "drafted";
    const near = this.#unshown.slice(0, LOOK_AHEAD);
    let found = near.findIndex((token) => token.drafted === drafted && token.text === piece.text);
    if (found < 0) found = near.findIndex((token) => token.drafted === drafted);
    if (found < 0) return this.rounds[this.rounds.length - 1] ?? null;
    const { round } = this.#unshown[found];
    this.#unshown.splice(0, found + 1);
    return round;
  }

  /**
   * Notes where the text ended.
   *
   * @param {number} total tokens of the whole text
   */
  close(total) {
    const last = this.rounds.at(-1);
    if (last) last.written = Math.max(0, total - (this.tokens - tokensOf(last)));
  }

  /** @returns {number} tokens written: accepted ones and one target token per round */
  get tokens() {
    return this.rounds.reduce((sum, round) => sum + tokensOf(round), 0);
  }
}

/**
 * @param {Round} round
 * @returns {number[]} indices of the accepted nodes, from the root down
 */
export function acceptedNodes(round) {
  return round.nodes.flatMap((node, i) => (node.accepted ? [i] : []));
}

/**
 * @param {Round} round
 * @param {number} node index; -1 is the root
 * @returns {Token | null} the target token after this node; null if unknown
 */
export function targetAfter(round, node) {
  return round.target_tokens?.[node + 1] ?? null;
}

/**
 * @param {Round} round
 * @returns {number[]} accepted nodes that are not the target token: rules other than `coupled` accept such tokens
 */
export function acceptedOthers(round) {
  return acceptedNodes(round).filter((i) => {
    const token = targetAfter(round, round.nodes[i].parent);
    return token !== null && token.id !== round.nodes[i].id;
  });
}

/** @param {Round} round */
function tokensOf(round) {
  return acceptedNodes(round).length + (round.bonus ? 1 : 0);
}

/**
 * @param {Round} round
 * @returns {("accepted" | "rejected" | "cut")[]} outcome of every node; "cut" is accepted, but after the end of the
 *     text
 */
export function outcomesOf(round) {
  const path = acceptedNodes(round);
  return round.nodes.map((node, i) => {
    if (!node.accepted) return "rejected";
    return path.indexOf(i) < (round.written ?? Infinity) ? "accepted" : "cut";
  });
}

/**
 * @param {Round} round
 * @returns {boolean} whether the target token comes after the end of the text
 */
export function isTargetCut(round) {
  return acceptedNodes(round).length >= (round.written ?? Infinity);
}

/**
 * @param {{parent: number}[]} nodes every parent comes before its children; -1 is the root
 * @returns {number[]} 1 for children of the root, 2 for theirs, …
 */
export function depthsOf(nodes) {
  /** @type {number[]} */
  const depths = [];
  for (const node of nodes) depths.push(node.parent < 0 ? 1 : depths[node.parent] + 1);
  return depths;
}

/**
 * @param {Round[]} rounds
 * @returns {{depth: number, drafted: number, accepted: number}[]} per depth: rounds whose tree reached it, and rounds
 *     in which a token at it was accepted
 */
export function acceptanceByDepth(rounds) {
  /** @type {{depth: number, drafted: number, accepted: number}[]} */
  const rows = [];
  for (const round of rounds) {
    const deepest = Math.max(0, ...depthsOf(round.nodes));
    const accepted = acceptedNodes(round).length;
    for (let depth = 1; depth <= deepest; depth++) {
      rows[depth - 1] ??= { depth, drafted: 0, accepted: 0 };
      rows[depth - 1].drafted += 1;
      if (depth <= accepted) rows[depth - 1].accepted += 1;
    }
  }
  return rows;
}

/**
 * A token as one visible line: spaces at its ends, line breaks and tabs become symbols.
 *
 * @param {string} text
 * @returns {string}
 */
export function visible(text) {
  const shown = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (run) => "␣".repeat(run.length));
  return shown === "" ? "∅" : shown;
}

/**
 * @param {Round} round
 * @returns {string} the round in one sentence
 */
export function describeRound(round) {
  const drafted = round.nodes.length;
  const path = acceptedNodes(round);
  const end = isTargetCut(round) ? " The text ends within this round." : "";
  const bonus = round.bonus ? `“${visible(round.bonus.text)}”` : "nothing";
  if (drafted === 0) return `No draft; target token ${bonus}.${end}`;
  const tokens = drafted === 1 ? "1 drafted token" : `${drafted} drafted tokens`;
  if (path.length === 0) return `None of ${tokens} accepted; target token ${bonus}.${end}`;
  const text = path.map((node) => round.nodes[node].text).join("");
  const others = acceptedOthers(round).length;
  const note = others ? ` ${others} of the accepted ${others === 1 ? "is" : "are"} not the target token.` : "";
  return `${path.length} of ${tokens} accepted: “${visible(text)}”; target token ${bonus}.${note}${end}`;
}
