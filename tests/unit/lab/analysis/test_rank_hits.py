"""Rank hits are counted from drafted trees, independent of scoring and acceptance."""

from __future__ import annotations

import io
import json
from pathlib import Path

from draftree import LLM, SamplingParams
from draftree.core.tree import TokenTree
from draftree.engine.trace import Step, Trace, TracedRound, TraceHeader, TraceWriter, read_trace
from draftree.lab.analysis.simulation import rank_hits, replays
from draftree.models.table import TableLM, hashed

HEADER = TraceHeader("table", "synthetic", "coupled", "watch", (), {})
WIDE = TokenTree((5, 7, 9, 1), (-1, -1, -1, 0), (-0.1, -0.2, -0.3, -0.4))
MODEL = TableLM(hashed(6, seed=3, scale=3.0), order=2)


def step(tree: TokenTree, *, bonus: int | None, path: tuple[int, ...] = ()) -> Step:
    return Step("a/0", 3, 10, tree, None, path, bonus, 1)


def trace(*steps: Step) -> Trace:
    return Trace(HEADER, tuple(TracedRound({}, (), 1, (one,)) for one in steps))


def test_the_rank_of_the_next_token_is_its_place_among_the_roots_children() -> None:
    found = rank_hits(trace(step(WIDE, bonus=5), step(WIDE, bonus=9), step(WIDE, bonus=1), step(WIDE, bonus=5)))
    assert found.hits == (2, 0, 1)
    assert found.cumulated == (0.5, 0.5, 0.75)


def test_an_accepted_first_guess_counts_by_the_path_not_by_the_bonus() -> None:
    assert rank_hits(trace(step(WIDE, bonus=4, path=(1,)))).hits == (0, 1, 0)


def test_positions_without_a_draft_count_and_failed_ones_do_not() -> None:
    empty = TokenTree((), (), ())
    found = rank_hits(trace(step(WIDE, bonus=5), step(empty, bonus=2), step(WIDE, bonus=None)))
    assert (found.num_positions, found.num_drafted) == (2, 1)
    assert found.cumulated == (0.5, 0.5, 0.5)


def test_a_recorded_drafter_of_known_acceptance_has_its_rate(tmp_path: Path) -> None:
    stream = io.StringIO()
    writer = TraceWriter(stream)
    llm = LLM(MODEL, "synthetic,accept=1,k=1", plan="watch", on_round=writer)
    writer.begin(TraceHeader("table", "synthetic", "coupled", "watch", llm.planner.parts, {1: 1.0, 2: 1.0}))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=40, temperature=0.9, seed=2))
    path = tmp_path / "trace.jsonl"
    path.write_text(stream.getvalue(), encoding="utf-8")
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "trace"
    found = rank_hits(read_trace(path))
    assert found.num_positions == 40
    assert found.hits[0] == found.num_drafted
    assert found.num_drafted >= 38
    assert "among the first guesses" in replays(read_trace(path), plans=["fixed"], sizes=[1])
