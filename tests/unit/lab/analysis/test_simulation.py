"""Recorded traces under other planners, bounds, and rank hits."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

from draftree import LLM, SamplingParams
from draftree.build import choose_methods
from draftree.core.tree import TokenTree
from draftree.core.types import RoundRecord
from draftree.engine.trace import Step, Trace, TracedRound, TraceHeader, TraceWriter, acceptance_length, read_trace
from draftree.lab.analysis.simulation import Simulated, Simulation, TraceCosts, below, bounds, rank_hits, replays
from draftree.models.table import TableLM, hashed
from draftree.planners.base import Planner

MODEL = TableLM(hashed(6, seed=3, scale=3.0), order=2)
PROMPTS = [[1, 2, 3], [4, 5, 1, 2], [2]]
STOP = 4


class LineCosts:
    """Costs that are written down: a pass over one row, and every further row; drafts are free."""

    def __init__(self, *, base: float, row: float) -> None:
        self._base, self._row = base, row

    def pass_seconds(self, rows: int, *, batch: int, prefix: int) -> float:
        return self._base + self._row * (rows - 1)

    def draft_seconds(self, part: int, depth: int) -> float:
        return 0.0


def record(
    draft: str, plan: str, path: Path, *, prompts: list[list[int]], max_tokens: int = 80, **params: object
) -> Trace:
    rounds: list[RoundRecord] = []
    llm = LLM(MODEL, draft, plan=plan, on_round=rounds.append)
    llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=2, **params))  # type: ignore[arg-type]
    header = TraceHeader("table", draft, "coupled", plan, llm.planner.parts, llm.planner.pass_seconds)
    with path.open("w", encoding="utf-8") as stream:
        writer = TraceWriter(stream)
        writer.begin(header)
        for one in rounds:
            writer(one)
    return read_trace(path)


def planner(trace: Trace, plan: str) -> Planner:  # type: ignore[type-arg]
    return choose_methods(trace.header.draft, "coupled", plan).planner


def simulate(trace: Trace, plan: str) -> Simulated:
    return Simulation(trace, planner(trace, plan), TraceCosts(trace)).run()


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "batch"])
@pytest.mark.parametrize("plan", ["fixed", "fixed:3", "heuristic", "additive", "adaptive", "watch"])
@pytest.mark.parametrize("draft", ["suffix", "ngram,min=1", "ngram,min=1+lookahead", "synthetic,accept=0.7,k=5"])
def test_the_planner_that_was_recorded_does_the_same_again(
    draft: str, plan: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    trace = record(draft, plan, tmp_path / "t.jsonl", prompts=prompts)
    found = simulate(trace, plan)
    steps = [step for one in trace.rounds for step in one.steps]
    assert found.rounds == len(trace.rounds)
    assert found.steps == len(steps)
    assert found.tokens == sum(step.num_written for step in steps)
    assert found.drafted == sum(len(step.tree) if step.kept is None else len(step.kept) for step in steps)
    assert found.accepted == sum(min(step.num_written, len(step.path)) for step in steps)
    assert found.missing == 0
    assert found.acceptance_length == acceptance_length(trace.rounds)


def test_a_text_that_a_stop_cut_off_is_simulated_to_the_letter(tmp_path: Path) -> None:
    trace = record("suffix", "fixed", tmp_path / "t.jsonl", prompts=PROMPTS, stop_token_ids=(STOP,), max_tokens=300)
    found = simulate(trace, "fixed")
    assert found.acceptance_length == acceptance_length(trace.rounds)
    assert found.steps == sum(len(one.steps) for one in trace.rounds)


@pytest.mark.parametrize("plan", ["fixed", "fixed:2", "heuristic", "threshold:0.5", "threshold:0.9,k=4"])
def test_a_watched_trace_determines_every_planners_result(plan: str, tmp_path: Path) -> None:
    """A drafter that depends only on the text drafts the same at a position, however the loop reached it."""
    watched = record("ngram,min=1", "watch", tmp_path / "w.jsonl", prompts=PROMPTS[:1])
    real = record("ngram,min=1", plan, tmp_path / "r.jsonl", prompts=PROMPTS[:1])
    found = simulate(watched, plan)
    assert found.missing == 0
    assert found.acceptance_length == acceptance_length(real.rounds)
    assert acceptance_length(watched.rounds) == 1.0


def test_no_planner_beats_the_bound_of_its_size(tmp_path: Path) -> None:
    trace = record("suffix", "watch", tmp_path / "t.jsonl", prompts=PROMPTS)
    costs = LineCosts(base=1.0, row=0.1)
    found = bounds(trace, costs, (0, 1, 2, 4, 16))
    lengths = [bound.acceptance_length for bound in found]
    assert lengths == sorted(lengths)
    assert found[0].acceptance_length == 1.0
    assert found[0].tokens_per_second == pytest.approx(1.0)
    for bound in found:
        assert simulate(trace, f"fixed:{bound.num_nodes}").acceptance_length <= bound.acceptance_length + 1e-9


def test_given_costs_are_used(tmp_path: Path) -> None:
    """Where rows cost as much as passes nothing is drafted for long; where they are free much is."""
    trace = record("suffix", "watch", tmp_path / "t.jsonl", prompts=PROMPTS[:1])
    seconds = {"plan": 0.0, "draft": 0.01, "score": 1.0, "verify": 0.0, "commit": 0.0, "total": 1.01}
    trace = dataclasses.replace(trace, rounds=tuple(dataclasses.replace(r, seconds=seconds) for r in trace.rounds))
    drafted = []
    for row in (1.0, 0.0):
        told = dataclasses.replace(trace.header, pass_seconds={n: 1.0 + row * (n - 1) for n in (1, 4, 16, 64)})
        costs = LineCosts(base=1.0, row=row)
        other = dataclasses.replace(trace, header=told)
        drafted.append(Simulation(other, planner(other, "adaptive"), costs).run().drafted)
    assert drafted[0] < 0.5 * drafted[1]


def test_the_subtree_after_given_tokens() -> None:
    tree = TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, -1), (-1.0, -1.5, -2.0, -2.5, -3.0))
    left = below(tree, [5])
    assert left is not None
    assert (left.tokens, left.parents) == ((6, 7, 8), (-1, -1, 0))
    assert left.scores == (-0.5, -1.0, -1.5)
    assert below(tree, [5, 9]) is None
    assert below(tree, [5, 6, 8]) == TokenTree((), ())


HEADER = TraceHeader("table", "synthetic", "coupled", "watch", (), {})
WIDE = TokenTree((5, 7, 9, 1), (-1, -1, -1, 0), (-0.1, -0.2, -0.3, -0.4))


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
    assert "among the first guesses" in replays(read_trace(path), ["fixed"])
