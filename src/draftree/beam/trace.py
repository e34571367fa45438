"""Record of a search (every sequence that was a beam, and when it was live), and its picture as SVG."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from draftree.beam.result import Hypothesis
    from draftree.beam.sequence import SequenceSearch

ROOT = -1  # parent of the first tokens


class Status(StrEnum):
    COMMITTED = "committed"  # common to all live beams
    LIVE = "live"
    RETURNED = "returned"  # part of a finished sequence that is returned
    FINISHED = "finished"  # part of a finished sequence that is not returned
    DEAD = "dead"  # part of no live beam and of no finished sequence


@dataclass(slots=True)
class TraceNode:
    """One token of one or more beams.

    `born` is the step that chose it, `last_live` the last step after which it was part of a live beam (0 for none), and
    `ended` the step in which a sequence finished here.
    """

    token: int
    parent: int
    depth: int
    group: int
    logprob: float
    total: float
    born: int
    last_live: int = 0
    ended: int | None = None


@final
@dataclass(slots=True)
class BeamTrace:
    """Observer of one search: give it as `on_step`.

    Parents precede children in `nodes`. `ends` has the node and the hypothesis of each finished sequence, best first.
    """

    nodes: list[TraceNode] = field(default_factory=list)
    num_steps: int = 0
    num_groups: int = 1
    ends: list[tuple[int, Hypothesis]] = field(default_factory=list)
    num_returned: int = 1
    _places: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def __call__(self, search: SequenceSearch) -> None:
        self.num_steps = step = search.num_steps
        has_groups = search.params.num_beam_groups > 1
        self.num_groups = len(search.groups) if has_groups else 1
        self.num_returned = search.params.num_return_sequences
        self.ends = []
        for number, group in enumerate(search.groups):
            place = number if has_groups else 0
            for beam in group.beams:
                for node in self._path(place, beam.tokens, beam.logprobs, step):
                    self.nodes[node].last_live = step
            for hypothesis in group.hypotheses:
                end = self._path(place, hypothesis.tokens, hypothesis.token_logprobs, step)[-1]
                if self.nodes[end].ended is None:
                    self.nodes[end].ended = step
                self.ends.append((end, hypothesis))
        self.ends.sort(key=lambda pair: (not pair[1].constraints_met, -pair[1].score))

    def _path(self, group: int, tokens: tuple[int, ...], logprobs: Sequence[float], step: int) -> list[int]:
        """Return the nodes of a sequence; new ones are added."""
        parent = ROOT
        total = 0.0
        path = []
        for depth, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), 1):
            key = (group, tokens[:depth])
            total = total + logprob
            if key not in self._places:
                self._places[key] = len(self.nodes)
                self.nodes.append(TraceNode(token, parent, depth, group, logprob, total, step))
            parent = self._places[key]
            path.append(parent)
        return path

    def shown(self, step: int | None = None) -> dict[int, Status]:
        """Return the nodes that exist after a step, and what they are then; None is the end, where no beam is live."""
        now = self.num_steps if step is None else min(step, self.num_steps)
        states = {
            place: Status.LIVE if node.last_live >= now else Status.DEAD
            for place, node in enumerate(self.nodes)
            if node.born <= now
        }
        ends = [place for place in states if (ended := self.nodes[place].ended) is not None and ended <= now]
        returned: set[int] = set()
        if now == self.num_steps:
            ends = [end for end, _ in self.ends]
            returned = set(ends[: self.num_returned])
        for end in sorted(ends, key=returned.__contains__):
            node = end
            while node != ROOT:
                if states[node] is not Status.LIVE:
                    states[node] = Status.RETURNED if end in returned else Status.FINISHED
                node = self.nodes[node].parent
        live = {place: self.nodes[place].depth for place, status in states.items() if status is Status.LIVE}
        counts = Counter(live.values())
        # all live beams share the nodes above the first depth with several
        parting = min((depth for depth, count in counts.items() if count > 1 or depth == max(counts)), default=0)
        return states | {place: Status.COMMITTED for place, depth in live.items() if depth < parting}


CHARACTER = 7.3  # width of a character of the labels, in pixels
BOX_HEIGHT, ROW_HEIGHT, GAP = 22, 40, 34
MARGIN, TITLE_HEIGHT, LEGEND_HEIGHT, GROUP_GAP = 16, 34, 40, 18
MAX_LABEL = 44  # characters of the prompt that are shown: its end
LEGEND = {
    Status.COMMITTED: "common prefix",
    Status.LIVE: "live beam",
    Status.RETURNED: "finished, returned",
    Status.FINISHED: "finished, not returned",
    Status.DEAD: "dead",
}
STYLE = """
    text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; }
    .title { font: 600 14px system-ui, sans-serif; }
    .small { font-size: 10px; fill: #59636e; }
    .legend { font: 11px system-ui, sans-serif; fill: #59636e; }
    .paper { fill: #ffffff; }
    .prompt rect { fill: #f6f8fa; stroke: #8c959f; }
    .committed rect { fill: #ddf4ff; stroke: #0969da; }
    .live rect { fill: #ffffff; stroke: #0969da; }
    .returned rect { fill: #dafbe1; stroke: #1a7f37; }
    .finished rect { fill: #ffffff; stroke: #4ac26b; stroke-dasharray: 4 2; }
    .dead rect { fill: #ffffff; stroke: #d1d9e0; }
    .dead text { fill: #818b98; }
    path { fill: none; stroke-linecap: round; }
    path.committed, path.live { stroke: #54aeff; }
    path.returned { stroke: #4ac26b; }
    path.finished { stroke: #aceebb; }
    path.dead { stroke: #e4e8ec; }
    .end { fill: #1a7f37; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .small, .legend { fill: #9198a1; }
      .paper { fill: #0d1117; }
      .prompt rect { fill: #151b23; stroke: #656c76; }
      .committed rect { fill: #121d2f; stroke: #4493f8; }
      .live rect { fill: #0d1117; stroke: #4493f8; }
      .returned rect { fill: #12261e; stroke: #3fb950; }
      .finished rect { fill: #0d1117; stroke: #2ea043; }
      .dead rect { fill: #0d1117; stroke: #3d444d; }
      .dead text { fill: #656c76; }
      path.committed, path.live { stroke: #1f6feb; }
      path.returned { stroke: #2ea043; }
      path.finished { stroke: #1b4721; }
      path.dead { stroke: #2a313c; }
      .end { fill: #3fb950; }
    }
"""


@dataclass(frozen=True, slots=True)
class Box:
    """Place of a node: left edge, middle line and width."""

    x: float
    y: float
    width: float


def tree_svg(
    trace: BeamTrace,
    token_text: Callable[[int], str],
    *,
    prompt: str = "",
    title: str = "",
    step: int | None = None,
) -> str:
    """Draw the tree of a search.

    A box is a token with its probability, a line is as thick as the probability. Finished sequences have their score.

    `prompt`: text before the tree; its end is shown. `title`: heading; empty for none. `step`: state after this step;
    None for the end of the search.
    """
    shown = trace.shown(step)
    labels = {place: label_of(token_text(trace.nodes[place].token)) for place in shown}
    start = label_of(prompt[-MAX_LABEL:]) if prompt.strip() else "prompt"
    boxes, height = _laid_out(trace, shown, labels, start)
    now = trace.num_steps if step is None else min(step, trace.num_steps)
    scores = {end: hypothesis for end, hypothesis in trace.ends if trace.nodes[end].ended <= now}  # type: ignore[operator]
    ranks = {end: rank for rank, (end, _) in enumerate(trace.ends, 1)} if now == trace.num_steps else {}
    drawn_last = [Status.DEAD, Status.FINISHED, Status.LIVE, Status.COMMITTED, Status.RETURNED]
    ordered = sorted(shown.items(), key=lambda pair: drawn_last.index(pair[1]))
    parts = [_edge(boxes, trace, place, status) for place, status in ordered]
    parts += [_box(boxes[ROOT - group], start, "prompt") for group in range(trace.num_groups)]
    for place, status in shown.items():
        parts.append(_box(boxes[place], labels[place], status, probability=math.exp(trace.nodes[place].logprob)))
        if place in scores:
            mark = "■" if scores[place].finish_reason == "stop" else "▶"
            rank = f" #{ranks[place]}" if place in ranks else ""
            parts.append(_note(boxes[place], f"{mark}{rank} {scores[place].score:.2f}", "end"))
        elif status is Status.LIVE and trace.nodes[place].depth == now:
            parts.append(_note(boxes[place], f"{trace.nodes[place].total:.2f}", "small"))
    right = max(box.x + box.width for box in boxes.values()) + 110
    return _document(parts, title, sorted(set(shown.values()), key=list(LEGEND).index), right, height)


def label_of(text: str) -> str:
    """Return the text of a box: without the space before it, line breaks as a sign."""
    return text.translate({ord("\r"): None, ord("\n"): "↵", ord("\t"): "⇥"}).strip(" ") or "␣"


def _laid_out(
    trace: BeamTrace, shown: dict[int, Status], labels: dict[int, str], start: str
) -> tuple[dict[int, Box], float]:
    """Return the box of every node, the prompts' at `ROOT - group`, and the height of the picture."""
    children: dict[int, list[int]] = {}
    widest: dict[int, float] = {0: _width(start)}
    for place in shown:
        node = trace.nodes[place]
        children.setdefault(ROOT - node.group if node.parent == ROOT else node.parent, []).append(place)
        widest[node.depth] = max(widest.get(node.depth, 0.0), _width(labels[place]))
    columns = sorted(widest)
    steps = (widest[depth] + GAP for depth in columns)
    left = dict(zip(columns, itertools.accumulate(steps, initial=float(MARGIN)), strict=False))
    boxes: dict[int, Box] = {}
    row = 0.0

    def put(place: int, depth: int, text: str) -> None:
        nonlocal row
        boxes[place] = Box(left[depth], row, _width(text))
        # better continuations above
        for number, child in enumerate(
            sorted(children.get(place, ()), key=lambda node: (-trace.nodes[node].total, node))
        ):
            if number:
                row += ROW_HEIGHT
            put(child, depth + 1, labels[child])

    row = MARGIN + TITLE_HEIGHT + BOX_HEIGHT / 2
    for group in range(trace.num_groups):
        put(ROOT - group, 0, start)
        row += ROW_HEIGHT + (GROUP_GAP if group + 1 < trace.num_groups else 0)
    return boxes, row - ROW_HEIGHT + BOX_HEIGHT


def _width(text: str) -> float:
    return round(CHARACTER * len(text) + 14, 1)


def _edge(boxes: dict[int, Box], trace: BeamTrace, place: int, status: Status) -> str:
    node = trace.nodes[place]
    above = boxes[ROOT - node.group if node.parent == ROOT else node.parent]
    box = boxes[place]
    x1, x2 = above.x + above.width, box.x
    thickness = 1.0 + 4.0 * math.exp(min(0.0, node.logprob))
    bend = x2 - GAP / 2
    curve = f"M{x1:g} {above.y:g} H{bend - 8:g} C{bend + 4:g} {above.y:g} {bend - 4:g} {box.y:g} {x2:g} {box.y:g}"
    line = f"M{x1:g} {box.y:g} H{x2:g}" if above.y == box.y else curve
    return f'<path class="{status}" d="{line}" stroke-width="{thickness:.1f}"/>'


def _box(box: Box, text: str, kind: str, *, probability: float | None = None) -> str:
    shape = (
        f'<rect x="{box.x:g}" y="{box.y - BOX_HEIGHT / 2:g}" width="{box.width:g}" height="{BOX_HEIGHT}" rx="5"/>'
        f'<text x="{box.x + 7:g}" y="{box.y + 4:g}">{escape(text)}</text>'
    )
    if probability is not None:
        percent = f"{100 * probability:.0f} %" if probability >= 0.005 else "<1 %"
        shape += f'<text class="small" x="{box.x + 2:g}" y="{box.y + BOX_HEIGHT / 2 + 10:g}">{escape(percent)}</text>'
    return f'<g class="{kind}">{shape}</g>'


def _note(box: Box, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{box.x + box.width + 6:g}" y="{box.y + 4:g}">{escape(text)}</text>'


def _document(parts: Sequence[str], title: str, kinds: Sequence[Status], width: float, height: float) -> str:
    legend = []
    x = float(MARGIN)
    y = height + LEGEND_HEIGHT / 2 + 6
    for kind in kinds:
        legend.append(f'<g class="{kind}"><rect x="{x:g}" y="{y - 9:g}" width="18" height="12" rx="3"/></g>')
        legend.append(f'<text class="legend" x="{x + 24:g}" y="{y + 1:g}">{LEGEND[kind]}</text>')
        x += 40 + 6.2 * len(LEGEND[kind])
    legend.append(f'<text class="legend" x="{x:g}" y="{y + 1:g}">■ end of text, ▶ limit; score at the end</text>')
    width, whole = math.ceil(max(width, x + 240)), math.ceil(height + LEGEND_HEIGHT)
    head = f'<text class="title" x="{MARGIN}" y="{MARGIN + 12}">{escape(title)}</text>' if title else ""
    lines = "\n  ".join([head, *parts, *legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" width="{width}" height="{whole}">\n'
        f"  <title>{escape(title or 'Tree of a beam search')}</title>\n  <style>{STYLE}  </style>\n"
        f'  <rect class="paper" width="{width}" height="{whole}" rx="8"/>\n  {lines}\n</svg>\n'
    )
