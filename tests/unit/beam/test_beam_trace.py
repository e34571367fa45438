"""The record of a search and its picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.search import BeamSearch
from draftree.beam.sequence import SequenceSearch
from draftree.beam.trace import ROOT, BeamTrace, Status, label_of, tree_svg
from draftree.models.table import TableLM, hashed

SVG = "{http://www.w3.org/2000/svg}"
TABLE = hashed(9, 2, scale=1.2)


class Watching(BeamTrace):
    """A trace that also keeps the live beams after each step."""

    live: list[list[tuple[int, ...]]]

    def __call__(self, text: SequenceSearch) -> None:
        super().__call__(text)
        self.live = [*getattr(self, "live", []), [beam.tokens for beam in text.live]]


def traced(**given: Any) -> tuple[Watching, BeamResult]:
    trace = Watching()
    params = BeamSearchParams(**{"beam_width": 3, "max_new_tokens": 8, "num_return_sequences": 2, **given})
    (result,) = BeamSearch(TableLM(TABLE), end_ids=[0], on_step=trace).run([[1, 2]], [params])
    return trace, result


def text_at(trace: BeamTrace, node: int) -> tuple[int, ...]:
    tokens: list[int] = []
    while node != ROOT:
        tokens.append(trace.nodes[node].token)
        node = trace.nodes[node].parent
    return tuple(tokens[::-1])


def test_live_nodes_are_the_prefixes_of_the_live_beams() -> None:
    trace, _ = traced(early_stopping="never")
    assert trace.num_steps > 5
    for step, beams in enumerate(trace.live[:-1], 1):
        prefixes = {beam[:end] for beam in beams for end in range(1, len(beam) + 1)}
        shown = trace.shown(step)
        live = {text_at(trace, node) for node, status in shown.items() if status in (Status.LIVE, Status.COMMITTED)}
        assert live == prefixes
        common = {prefix for prefix in prefixes if all(beam[: len(prefix)] == prefix for beam in beams)}
        committed = {text_at(trace, node) for node, status in shown.items() if status is Status.COMMITTED}
        assert committed == {prefix for prefix in common if len(prefix) < step}


def test_the_end_shows_what_is_returned() -> None:
    trace, result = traced()
    shown = trace.shown()
    assert Status.LIVE not in shown.values()
    returned = {text_at(trace, node) for node, status in shown.items() if status is Status.RETURNED}
    assert returned == {f.tokens[:end] for f in result.hypotheses for end in range(1, len(f.tokens) + 1)}
    assert [hypothesis.tokens for _, hypothesis in trace.ends[:2]] == [found.tokens for found in result.hypotheses]
    for end, hypothesis in trace.ends:
        assert text_at(trace, end) == hypothesis.tokens
        assert trace.nodes[end].total == pytest.approx(hypothesis.cumulative_logprob)


def test_groups_have_trees_of_their_own() -> None:
    trace, _ = traced(beam_width=4, num_beam_groups=2, diversity_penalty=0.5)
    assert trace.num_groups == 2
    assert {node.group for node in trace.nodes} == {0, 1}
    for node in trace.nodes:
        assert node.parent == ROOT or trace.nodes[node.parent].group == node.group


@pytest.mark.parametrize("step", [None, 1, 4, 99])
@pytest.mark.parametrize("given", [{}, {"beam_width": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}])
def test_a_picture_has_every_node_once(step: int | None, given: dict[str, Any]) -> None:
    trace, result = traced(**given)
    svg = tree_svg(trace, lambda token: f" <{token}&", prompt="a <b>", title="A & B", step=step)
    root = ElementTree.fromstring(svg)
    boxes = [group for group in root.iter(f"{SVG}g") if len(list(group.iter(f"{SVG}text")))]
    shown = trace.shown(step)
    assert len(boxes) == len(shown) + trace.num_groups
    kinds = [group.get("class") for group in boxes]
    assert sorted(kind for kind in kinds if kind != "prompt") == sorted(map(str, shown.values()))  # type: ignore[type-var]
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    rects = [rect for group in boxes for rect in group.iter(f"{SVG}rect")]
    places = [(float(r.get("x", 0)), float(r.get("y", 0)), float(r.get("width", 0))) for r in rects]
    assert all(x >= 0 and y >= 0 and x + w <= width and y + 22 <= height for x, y, w in places)
    for x, y, w in places:
        overlapping = [p for p in places if p[1] == y and p[0] < x + w and x < p[0] + p[2]]
        assert len(overlapping) == 1
    if step is None:
        assert f"#1 {result.best.score:.2f}" in svg


def test_labels() -> None:
    assert [label_of(text) for text in (" cat", "\n", " ", "")] == ["cat", "↵", "␣", "␣"]
