"""Measured servers: costs of the host from traces, files, passes of several rows, clients over networks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import script
from draftree.core.errors import ConfigurationError
from draftree.core.tree import TokenTree
from draftree.engine.trace import Step, Trace, TracedRound, TraceHeader
from draftree.lab.fleet.curves import MeasuredCurve
from draftree.lab.fleet.measured import MeasuredDraft, Measurements
from draftree.lab.fleet.simulation import Fleet, FleetSettings, HostCosts, RoundOutcome, SimulatedRequest

runs: Any = script("scale.measured_runs")

POINTS = [(1, 1, 100, 0.010), (1, 4, 100, 0.016), (4, 1, 100, 0.013), (4, 4, 100, 0.030)]


class Flat:
    """A pass that always takes a second."""

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        return 1.0


def run_of(names: str, count: int, *, total: float, draft: float) -> Trace:
    """A run of some sequences, with rounds that all take the same time."""
    tree = TokenTree((1, 2), (-1, 0))
    rounds = [
        TracedRound(
            {"total": total, "draft": draft, "score": 1.0},
            (),
            3 * len(names),
            tuple(Step(name, 10 + place, 20, tree, None, (0,), 5, 2) for name in names),
        )
        for place in range(count)
    ]
    return Trace(TraceHeader("", "", "coupled", "fixed", (), {}), tuple(rounds))


def test_the_host_takes_what_is_beside_draft_and_pass() -> None:
    alone = [run_of("a", 4, total=1.7, draft=0.5), run_of("b", 4, total=1.7, draft=0.5)]
    found = runs.host_costs(alone, run_of("abcde", 4, total=3.6, draft=1.5), Flat())
    # 0.2 s for one sequence, 1.1 s for five; drafting for four more costs one second
    assert found.overhead_per_sequence == pytest.approx((1.1 - 0.2) / 4)
    assert found.overhead == pytest.approx(0.2 - found.overhead_per_sequence)
    assert found.draft_share == pytest.approx(1.0 / (4 * 0.5))


def test_the_mean_of_unequal_rounds_counts() -> None:
    """A run takes the sum of its rounds: one round in four that takes longer adds to all."""
    even, late = run_of("a", 4, total=1.5, draft=0.5), run_of("a", 2, total=2.5, draft=0.5)
    mixed = Trace(even.header, (*even.rounds, late.rounds[0]), {})
    assert runs.host_costs([mixed], run_of("a", 4, total=1.5, draft=0.5), Flat()).overhead == pytest.approx(0.25)


def test_texts_take_time_besides_their_rounds() -> None:
    text, own = SimulatedRequest(0.0, 8, 4, (RoundOutcome(1, 2, 0.5),)), HostCosts(overhead=0.25, draft_share=0.5)
    alone, three = 2 * (1 + 0.25 + 0.5), 2 * (1 + 0.25 + 2 * 0.5)
    found = runs.with_texts(
        own, Flat(), [(text, alone + 1.5), (text, alone + 2.5)], ([text] * 3, three + 2.0 + 2 * 0.75)
    )
    assert found == replace(own, opening=pytest.approx(0.75), prompt_step=pytest.approx(2.0 - 0.75))
    settings = FleetSettings(host=found, opens=True)
    assert Fleet(Flat(), settings).run([text]).seconds == pytest.approx(alone + 2.0)
    assert Fleet(Flat(), settings).run([text] * 3).seconds == pytest.approx(three + 2.0 + 2 * 0.75)
    nothing = runs.with_texts(own, Flat(), [(text, 1.0)], ([text] * 3, 1.0))
    assert nothing == own, "no text takes less than its rounds"


def test_runs_without_rounds_after_the_prompt_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="record longer texts"):
        runs.host_costs([run_of("a", 1, total=1.0, draft=0.0)], run_of("ab", 3, total=1.0, draft=0.0), Flat())


def test_several_rows_of_several_sequences_are_reproduced() -> None:
    curve = MeasuredCurve(POINTS)
    for batch, rows, prefix, seconds in POINTS:
        assert curve.seconds(batch, batch * rows, prefix) == pytest.approx(seconds)
    assert 0.013 < curve.seconds(4, 8, 100) < 0.030
    assert curve.seconds(2, 8, 100) < 0.030


def test_rows_that_only_read_a_prompt_have_costs_of_their_own() -> None:
    curve = MeasuredCurve(POINTS, prompts={16: 0.020, 64: 0.050})
    assert curve.seconds(1, 64, 100, prompt_rows=64) == pytest.approx(0.050)
    assert curve.seconds(1, 17, 100, prompt_rows=16) == pytest.approx(0.010 + 0.020 - 0.010)
    # without such passes they cost as other rows
    assert MeasuredCurve(POINTS).seconds(1, 4, 100, prompt_rows=3) == pytest.approx(0.016)


def test_drafts_for_a_batch_cost_a_share_of_drafts_one_after_another() -> None:
    requests = runs.requests_of_texts([1, 1, 1], 4, [(RoundOutcome(1, 2, 0.5),)] * 3)
    for share, draft in ((0.0, 0.5), (0.25, 0.75), (1.0, 1.5)):
        found = Fleet(Flat(), FleetSettings(host=HostCosts(draft_share=share))).run(requests)
        assert found.seconds == pytest.approx(2 * (1 + draft))


def test_clients_that_draft_pay_for_the_network_in_every_round() -> None:
    settings = FleetSettings(round_trip=2.0, client_overhead=0.25)
    found = Fleet(Flat(), settings).run([SimulatedRequest(0.0, 1, 6, (RoundOutcome(1, 2, 0.5),))])
    assert found.by_request == (3 * 1 + 2 * (2.0 + 0.25 + 0.5),)
    seen = runs.client_seconds(found.by_request[0], 2.0, draft_seconds=0.5, client_overhead=0.25)
    assert seen == 3 * (1 + 2.0 + 0.25 + 0.5) + 2.0, "three rounds, and a round trip to open the text"


@pytest.mark.parametrize(("trip", "seconds"), [(0.0, 10.0), (1.0, 11.0), (4.0, 16.0), (10.0, 20.0), (40.0, 80.0)])
def test_a_streamed_text_is_read_with_the_first_read_after_its_end(trip: float, seconds: float) -> None:
    assert runs.streamed_seconds(10.0, trip) == seconds


def test_a_file_holds_passes_and_rounds(tmp_path: Path) -> None:
    host = HostCosts(0.001, 0.0002, 0.5)
    measured = MeasuredDraft(host, [(RoundOutcome(4, 3, 0.002), RoundOutcome(0, 1, 0.001))])
    passes = [{"kind": "pass", "batch": 1, "prefix": 64, "rows": 1, "milliseconds": [9.0, 10.0, 30.0]}]
    path = tmp_path / "measured.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"token_share": 1e-4}, *passes, measured.line("suffix")])))
    found = Measurements.read(path)
    assert found.draft("suffix") == measured
    assert found.draft("suffix").tokens_per_round == 2
    assert found.curve.seconds(1, 1, 64) == pytest.approx(0.010)
    with pytest.raises(ConfigurationError, match="no rounds of 'sufix': did you mean 'suffix'"):
        found.draft("sufix")
    with pytest.raises(ConfigurationError, match="does not exist"):
        Measurements.read(tmp_path / "missing")


def test_trees_that_arrive_apart_take_turns() -> None:
    """Two devices whose trees arrive at the same instant share every pass; a little apart, the first begins alone."""
    requests = [SimulatedRequest(0.0, 1, 8, (RoundOutcome(1, 2, 0.5),)) for _ in range(2)]
    together = Fleet(Flat(), FleetSettings(round_trip=0.25)).run(requests)
    assert together.steps == 4
    apart = Fleet(Flat(), FleetSettings(round_trip=0.25, jitter=0.01)).run(requests)
    assert apart.steps == 7, "the first pass is shared, the others are not"
    assert apart.seconds > together.seconds
