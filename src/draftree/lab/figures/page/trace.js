// Parsing of a trace: JSON lines of format 1 or 2, grouped by sequence.

const FORMATS = [1, 2];

function parseTrace(content) {
  const lines = content.split('\n').filter((line) => line.trim());
  let entries;
  try {
    entries = lines.map((line) => JSON.parse(line));
  } catch (error) {
    throw new Error(`The file is not a trace: ${error.message}`);
  }
  const head = entries[0];
  if (!head || head.kind !== 'trace') throw new Error('The file is not a trace: record one with --record.');
  if (!FORMATS.includes(head.format)) throw new Error(`The trace has format ${head.format}; this page reads 1 and 2.`);
  const texts = new Map();
  const sequences = new Map();
  let clock = 0;
  for (const entry of entries.slice(1)) {
    if (entry.kind === 'tokens') {
      for (const [token, text] of Object.entries(entry.texts)) texts.set(Number(token), text);
      continue;
    }
    const start = entry.start ?? clock;
    clock = start + entry.seconds.total;
    for (const step of entry.sequences) {
      if (!sequences.has(step.sequence)) sequences.set(step.sequence, []);
      const round = { ...step, start, seconds: entry.seconds, batch: entry.sequences.length };
      round.steps = walk(round);
      sequences.get(step.sequence).push(round);
    }
  }
  if (!sequences.size) throw new Error('The trace has no rounds.');
  return { head, texts, sequences, names: [...sequences.keys()] };
}

// The tokens that a round wrote, each with its origin.
function walk(round) {
  const drafted = round.path.map((node) => ({ token: round.tokens[node], drafted: true }));
  const bonus = round.bonus === null ? [] : [{ token: round.bonus, drafted: false }];
  return [...drafted, ...bonus].slice(0, round.written);
}

function textOf(trace, token) {
  return trace.texts.get(token) ?? `[${token}]`;
}

function visible(text) {
  return text.replaceAll('\n', '⏎').replaceAll(' ', '·').replaceAll('\t', '⇥');
}

// Depth of every node; the root's children have depth 1.
function depthsOf(parents) {
  const found = [];
  for (const parent of parents) found.push(parent < 0 ? 1 : found[parent] + 1);
  return found;
}

// The target token after a node, -1 for the root; undefined where the node was not scored or target tokens were not recorded.
function targetAfter(round, node) {
  if (!round.picks || !round.picks.length) {
    const place = node < 0 ? 0 : round.path.indexOf(node) + 1;
    if (node >= 0 && place === 0) return undefined;
    return place < round.path.length ? round.tokens[round.path[place]] : (round.bonus ?? undefined);
  }
  if (node < 0) return round.picks[0];
  const row = round.kept === null ? node : round.kept.indexOf(node);
  return row < 0 ? undefined : round.picks[row + 1];
}

function isScored(round, node) {
  return round.kept === null || round.kept.includes(node);
}

// Acceptance of the first drafted token, length of drafts, cost of a level and seconds of a pass, over one sequence.
function measuredOf(trace, rounds) {
  const decode = rounds.slice(1).length ? rounds.slice(1) : rounds;
  const drafting = decode.filter((round) => round.tokens.length && (round.kept === null || round.kept.length));
  const levels = drafting.map((round) => Math.max(...depthsOf(round.tokens.length ? round.parents : [])));
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const mean = (values) => (values.length ? sum(values) / values.length : 0);
  const planned = Number(trace.head.pass_seconds?.['1']);
  const pass = planned || mean(decode.map((round) => round.seconds.score / round.batch)) || 0.01;
  const spent = sum(decode.map((round) => round.seconds.total / round.batch));
  const written = sum(decode.map((round) => round.written));
  const drafts = sum(drafting.map((round) => round.seconds.draft / round.batch));
  return {
    k: mean(decode.map((round) => levels[drafting.indexOf(round)] ?? 0)),
    a: drafting.length ? drafting.filter((round) => round.path.length).length / drafting.length : 0,
    c: levels.length ? drafts / sum(levels) / pass : 0,
    pass,
    tokens: written / decode.length,
    speedup: spent ? (written * pass) / spent : 1,
  };
}
