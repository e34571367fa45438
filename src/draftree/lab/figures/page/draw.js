// The drawings: tree and table of a round, timeline, curves.

const BOX = { width: 108, height: 22, column: 150, row: 30, margin: 14 };
const PHASES = { draft: 'Draft', score: 'Score', verify: 'Verify', other: 'Other' };

// Nodes of the drawing: drafted nodes, and the target token at the end of the walk as a node of its own.
function shownNodes(trace, round) {
  const depths = depthsOf(round.parents);
  const nodes = [{ id: -1, parent: null, depth: 0, text: 'last token', kind: 'accepted' }];
  round.tokens.forEach((token, id) => {
    const kind = round.path.includes(id) ? 'accepted' : isScored(round, id) ? '' : 'dropped';
    nodes.push({ id, parent: round.parents[id], depth: depths[id], text: visible(textOf(trace, token)), kind });
  });
  if (round.bonus !== null) {
    const end = round.path.length ? round.path[round.path.length - 1] : -1;
    const depth = end < 0 ? 1 : depths[end] + 1;
    const text = visible(textOf(trace, round.bonus));
    nodes.push({ id: round.tokens.length, parent: end, depth, text, kind: 'target' });
  }
  return nodes;
}

function drawTree(trace, round) {
  const nodes = shownNodes(trace, round);
  const children = new Map();
  for (const node of nodes) {
    if (node.parent !== null) children.set(node.parent, [...(children.get(node.parent) ?? []), node.id]);
  }
  const heights = heightsOf(children);
  const x = (node) => BOX.margin + node.depth * BOX.column;
  const y = (node) => BOX.margin + heights.get(node.id) * BOX.row + BOX.height / 2;
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const deepest = Math.max(...nodes.map((node) => node.depth));
  const width = 2 * BOX.margin + deepest * BOX.column + BOX.width + 90;
  const height = 2 * BOX.margin + (Math.max(...heights.values()) + 1) * BOX.row;
  const title = `Tree of ${round.tokens.length} drafted tokens, ${round.path.length} accepted`;
  const picture = svg('svg', { width, height, role: 'img', 'aria-label': title });
  for (const node of nodes.slice(1)) {
    const from = byId.get(node.parent);
    const [x1, y1, x2, y2] = [x(from) + BOX.width, y(from), x(node), y(node)];
    const bend = (x1 + x2) / 2;
    picture.append(svg('path', { class: `edge ${node.kind}`, d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}` }));
  }
  for (const node of nodes) picture.append(...drawNode(trace, round, node, x(node), y(node), children));
  return picture;
}

function drawNode(trace, round, node, x, y, children) {
  const box = { x, y: y - BOX.height / 2, width: BOX.width, height: BOX.height, rx: 5, class: `box ${node.kind}` };
  const text = node.text.length > 14 ? `${node.text.slice(0, 13)}…` : node.text;
  const parts = [svg('g', {}, svg('rect', box), label(text, x + BOX.width / 2, y))];
  const target = node.kind === 'target' ? undefined : targetAfter(round, node.id);
  const isLeaf = !(children.get(node.id) ?? []).length;
  if (target !== undefined && isLeaf) {
    const written = svg('text', { x: x + BOX.width + 6, y, class: 'small', 'dominant-baseline': 'central' });
    written.append(`target: ${visible(textOf(trace, target))}`);
    parts.push(svg('g', {}, written));
  }
  return parts;
}

function drawTable(trace, round) {
  const depths = depthsOf(round.parents);
  const heads = ['node', 'parent', 'depth', 'token', 'score', 'drafter', 'scored', 'target token after it', 'accepted'];
  const head = html('tr', {}, ...heads.map((name) => html('th', { scope: 'col' }, name)));
  const code = (token) => (token === undefined ? '' : html('code', {}, visible(textOf(trace, token))));
  const rows = [-1, ...round.tokens.keys()].map((node) => {
    const isRoot = node < 0;
    const isAccepted = isRoot || round.path.includes(node);
    const score = round.scores?.length && !isRoot ? round.scores[node].toFixed(2) : '';
    const cells = [
      isRoot ? 'root' : node,
      isRoot ? '' : round.parents[node] < 0 ? 'root' : round.parents[node],
      isRoot ? 0 : depths[node],
      isRoot ? 'last token' : code(round.tokens[node]),
      score,
      isRoot ? '' : (round.sources?.[node] ?? []).join(' + '),
      isRoot || isScored(round, node) ? 'yes' : 'no',
      code(targetAfter(round, node)),
      isRoot ? '' : isAccepted ? 'yes' : 'no',
    ];
    const row = html('tr', { class: isAccepted && !isRoot ? 'accepted' : '' });
    cells.forEach((cell) => row.append(html('td', { class: typeof cell === 'number' ? 'number' : '' }, cell)));
    return row;
  });
  const caption = html('caption', {}, 'Drafted tokens of the round');
  return html('table', {}, caption, html('thead', {}, head), html('tbody', {}, ...rows));
}

function phaseSeconds(round) {
  const { draft, score, verify, total } = round.seconds;
  return { draft, score, verify, other: Math.max(0, total - draft - score - verify) };
}

function drawTimeline(rounds, current, choose) {
  const first = rounds[0].start;
  const ends = rounds.map((round) => round.start + round.seconds.total - first);
  const span = Math.max(...ends) || 1;
  const [width, height] = [Math.max(640, 14 * rounds.length), 54];
  const picture = svg('svg', { width, height, role: 'img', 'aria-label': `${rounds.length} rounds by phase` });
  rounds.forEach((round, number) => {
    let at = ((round.start - first) / span) * width;
    const left = at;
    const group = svg('g', { class: 'round', 'data-round': number });
    for (const [phase, seconds] of Object.entries(phaseSeconds(round))) {
      const length = (seconds / span) * width;
      group.append(svg('rect', { x: at, y: 6, width: Math.max(0, length), height: 26, fill: `var(--${phase})` }));
      at += length;
    }
    if (number === current) {
      group.append(svg('rect', { x: left, y: 4, width: Math.max(2, at - left), height: 30, class: 'current' }));
    }
    // phases may be too narrow to be hit
    group.append(svg('rect', { x: left, y: 0, width: Math.max(6, at - left), height: 40, class: 'hit' }));
    group.addEventListener('click', () => choose(number));
    picture.append(group);
  });
  for (const share of [0, 0.5, 1]) {
    const x = Math.min(width - 34, Math.max(20, share * width));
    picture.append(svg('g', { class: 'scale' }, label(`${(1000 * share * span).toFixed(0)} ms`, x, 46, 'small')));
  }
  return picture;
}

// A curve over K with the chosen K and the measured point.
function drawCurve(name, value, state, point, longest) {
  const [width, height, left, bottom, top] = [440, 220, 44, 34, 18];
  const values = Array.from({ length: longest + 1 }, (_, k) => value(k));
  const most = 1.1 * Math.max(...values, point.y, 1);
  const x = (k) => left + (k / longest) * (width - left - 14);
  const y = (v) => height - bottom - (v / most) * (height - bottom - top);
  const words = `${name}: ${value(state.k).toFixed(2)} at K = ${state.k}; measured ${point.y.toFixed(2)}`;
  const picture = svg('svg', { width, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': words });
  const labels = svg('g');
  picture.append(labels, svg('path', { class: 'axis', fill: 'none', d: `M${left} ${top}V${height - bottom}H${width - 14}` }));
  for (let k = 0; k <= longest; k += 4) labels.append(label(k, x(k), height - bottom + 12, 'small'));
  for (const v of [0, most / 2, most]) labels.append(label(v.toFixed(1), left - 18, y(v), 'small'));
  labels.append(label('length K', (left + width) / 2, height - 8, 'small'), label(name, width / 2, 8));
  picture.append(svg('path', { class: 'curve', d: values.map((v, k) => `${k ? 'L' : 'M'}${x(k)} ${y(v)}`).join('') }));
  picture.append(svg('circle', { class: 'chosen', cx: x(state.k), cy: y(value(state.k)), r: 5 }));
  const at = Math.min(longest, point.x);
  picture.append(svg('rect', { class: 'point', x: x(at) - 5, y: y(point.y) - 5, width: 10, height: 10 }));
  const away = at > longest / 2 ? -34 : 38;
  labels.append(label('measured', x(at) + away, y(point.y) - 10, 'small'));
  return picture;
}
