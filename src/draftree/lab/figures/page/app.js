// State in the address, controls, keys.

const LONGEST = 16;
const PLAY_SECONDS = 0.9;
const byId = (id) => document.getElementById(id);
const state = { s: 0, r: 0, k: 4, a: 0.7, c: 0.05, rtt: 0, t: 0 };
let trace = null;
let timer = null;

const rounds = () => trace.sequences.get(trace.names[state.s]);
const limited = (value, least, most) => Math.min(most, Math.max(least, Number.isFinite(value) ? value : least));

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(state)) if (given.has(name)) state[name] = Number(given.get(name));
  state.s = Math.floor(limited(state.s, 0, trace.names.length - 1));
  state.r = Math.floor(limited(state.r, 0, rounds().length - 1));
  state.k = Math.floor(limited(state.k, 0, LONGEST));
  state.a = limited(state.a, 0, 0.99);
  state.c = limited(state.c, 0, 1);
  state.rtt = limited(state.rtt, 0, 300);
  state.t = state.t ? 1 : 0;
}

function writeHash() {
  const given = new URLSearchParams(Object.entries(state).map(([name, value]) => [name, String(value)]));
  history.replaceState(null, '', `#${given}`);
}

function show() {
  const list = rounds();
  const round = list[state.r];
  byId('number').textContent = `${state.r + 1} of ${list.length}`;
  byId('round').max = list.length - 1;
  byId('round').value = state.r;
  byId('sequence').value = state.s;
  byId('as-table').checked = Boolean(state.t);
  showText(list);
  const words = round.steps.map((step) => textOf(trace, step.token)).join('');
  const scored = round.kept === null ? round.tokens.length : round.kept.length;
  byId('summary').textContent = `${round.tokens.length} tokens drafted, ${scored} scored, ${round.path.length} accepted, `
    + `${round.written} written: “${visible(words)}”, ${(1000 * round.seconds.total).toFixed(1)} ms.`;
  byId('tree').replaceChildren(state.t ? drawTable(trace, round) : drawTree(trace, round));
  byId('timeline').replaceChildren(drawTimeline(list, state.r, choose));
  showCurves(list);
  writeHash();
}

function showText(list) {
  const spans = list.flatMap((round, number) => round.steps.map((step) => {
    const kind = `token ${step.drafted ? 'drafted' : 'target'}${number === state.r ? ' now' : ''}`;
    const span = html('span', { class: kind, 'data-round': number }, textOf(trace, step.token));
    span.addEventListener('click', () => choose(number));
    return span;
  }));
  byId('text').replaceChildren(...spans);
  byId('text').querySelector('.now')?.scrollIntoView({ block: 'nearest' });
}

function showCurves(list) {
  const found = measuredOf(trace, list);
  const trip = state.rtt / 1000 / found.pass;
  for (const name of ['k', 'a', 'c', 'rtt']) byId(name).value = state[name];
  byId('k-value').textContent = state.k;
  byId('a-value').textContent = state.a.toFixed(2);
  byId('c-value').textContent = state.c.toFixed(2);
  byId('rtt-value').textContent = `${state.rtt} ms`;
  const tokens = (k) => expectedTokens(state.a, k);
  const speed = (k) => speedUp(state.a, k, state.c, trip);
  byId('curves').replaceChildren(
    drawCurve('tokens per pass', tokens, state, { x: found.k, y: found.tokens }, LONGEST),
    drawCurve('speed-up over plain decoding', speed, state, { x: found.k, y: found.speedup }, LONGEST),
  );
  const best = bestLength(state.a, state.c, trip, LONGEST);
  byId('verdict').textContent = `K = ${state.k}: ${tokens(state.k).toFixed(2)} tokens per pass, `
    + `speed-up ${speed(state.k).toFixed(2)}; best K = ${best} (${speed(best).toFixed(2)}). `
    + `Measured in this text: ${found.tokens.toFixed(2)} tokens per pass, α ${found.a.toFixed(2)}, c ${found.c.toFixed(2)}.`;
}

function choose(number) {
  state.r = limited(number, 0, rounds().length - 1);
  show();
}

function play(wanted) {
  clearInterval(timer);
  timer = wanted ? setInterval(() => (state.r + 1 < rounds().length ? choose(state.r + 1) : play(false)), 1000 * PLAY_SECONDS) : null;
  byId('play').textContent = wanted ? 'Pause' : 'Play';
  byId('play').setAttribute('aria-pressed', String(wanted));
}

function open(content) {
  trace = parseTrace(content);
  byId('error').hidden = true;
  const { model, draft, verify, plan, about = {} } = trace.head;
  const facts = [`${model}, drafter ${draft}, rule ${verify}, plan ${plan}`];
  for (const name of ['temperature', 'dtype', 'cpu']) if (about[name] !== undefined) facts.push(`${name} ${about[name]}`);
  byId('about').textContent = facts.join(', ');
  const options = trace.names.map((name, place) => html('option', { value: place }, `${place + 1}: ${name}`));
  byId('sequence').replaceChildren(...options);
}

function setMeasured() {
  const found = measuredOf(trace, rounds());
  Object.assign(state, { k: Math.round(limited(found.k, 0, LONGEST)), a: Number(limited(found.a, 0, 0.99).toFixed(2)) });
  Object.assign(state, { c: Number(limited(found.c, 0, 1).toFixed(2)), rtt: 0 });
  show();
}

async function load(file) {
  try {
    open(await file.text());
    Object.assign(state, { s: 0, r: 0 });
    show();
  } catch (error) {
    byId('error').textContent = error.message;
    byId('error').hidden = false;
  }
}

const KEYS = {
  ArrowLeft: () => choose(state.r - 1),
  ArrowRight: () => choose(state.r + 1),
  Home: () => choose(0),
  End: () => choose(rounds().length - 1),
  ' ': () => play(timer === null),
  t: () => { state.t = 1 - state.t; show(); },
};

function onKey(event) {
  const isField = event.target.closest('input, select, button');
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (isField || event.ctrlKey || event.metaKey || event.altKey || !(key in KEYS)) return;
  event.preventDefault();
  KEYS[key]();
}

function start() {
  for (const [phase, name] of Object.entries(PHASES)) {
    byId('phases').append(html('span', { class: 'key', style: `background: var(--${phase})` }), name);
  }
  open(byId('trace').textContent);
  if (!location.hash) setMeasured();
  readHash();
  show();
  const buttons = { first: () => 0, previous: () => state.r - 1, next: () => state.r + 1, last: () => rounds().length - 1 };
  for (const [id, number] of Object.entries(buttons)) byId(id).addEventListener('click', () => choose(number()));
  byId('play').addEventListener('click', () => play(timer === null));
  byId('round').addEventListener('input', (event) => choose(Number(event.target.value)));
  byId('sequence').addEventListener('change', (event) => { state.s = Number(event.target.value); choose(0); });
  byId('as-table').addEventListener('change', (event) => { state.t = Number(event.target.checked); show(); });
  for (const id of ['k', 'a', 'c', 'rtt']) {
    byId(id).addEventListener('input', (event) => { state[id] = Number(event.target.value); show(); });
  }
  byId('measured').addEventListener('click', setMeasured);
  byId('file').addEventListener('change', (event) => event.target.files.length && load(event.target.files[0]));
  window.addEventListener('hashchange', () => { readHash(); show(); });
  document.addEventListener('keydown', onKey);
}

start();
