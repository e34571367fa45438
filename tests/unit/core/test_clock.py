"""All planner times come from one injected clock, so a simulated one determines the default planner's decisions."""

from __future__ import annotations

import pytest

from draftree import SamplingParams
from draftree.build import costs_of, measure_costs
from draftree.core.types import RoundRecord
from draftree.models.base import LanguageModel
from draftree.models.table import TableLM, listed
from paced import PASS_SECONDS, TICK, FakeClock, PacedModel, compute_bound, memory_bound, paced_llm

PARAMS = SamplingParams(max_tokens=60, temperature=0.0)
VOCAB = 6


def cycle() -> TableLM:
    """Writes 0, 1, …, 5 over and over, so that copied drafts are always right."""
    distributions = {
        (token,): [float(other == (token + 1) % VOCAB) for other in range(VOCAB)] for token in range(VOCAB)
    }
    return TableLM(listed(distributions, [1 / VOCAB] * VOCAB), order=1)


def rounds(draft: str, cost: object = memory_bound) -> list[RoundRecord]:
    records: list[RoundRecord] = []
    llm = paced_llm(cycle(), draft, cost=cost, on_round=records.append)
    llm.generate([[0, 1, 2, 3, 4, 5, 0, 1]], PARAMS)
    assert llm.planner.wants_costs, "the default planner weighs costs"
    return records


def test_records_hold_the_seconds_of_the_clock() -> None:
    for record in rounds("ngram"):
        assert record.score_seconds == pytest.approx(memory_bound(record.num_rows), abs=10 * TICK)
        assert record.total_seconds == pytest.approx(record.score_seconds, abs=20 * TICK)


def test_merged_drafters_are_timed_by_the_clock() -> None:
    found = [record.part_seconds for record in rounds("ngram+suffix") if record.part_seconds]
    assert found
    assert all(seconds == pytest.approx((TICK, TICK), rel=1e-3) for seconds in found)


def test_the_default_planner_drafts_where_rows_are_cheap() -> None:
    found = rounds("ngram")
    assert sum(row.num_accepted for record in found for row in record.sequences) > 40
    assert len(found) < 20


def test_the_default_planner_stops_where_every_row_costs_a_pass() -> None:
    found = rounds("ngram", compute_bound)
    drafted = sum(row.num_drafted for record in found for row in record.sequences)
    assert drafted < 15
    assert len(found) > 40


def test_the_same_clock_gives_the_same_plan() -> None:
    one, other = (
        [(record.num_rows, record.total_seconds) for record in rounds("ngram+suffix", memory_bound)] for _ in range(2)
    )
    assert one == other


def test_costs_are_kept_for_each_clock_apart() -> None:
    inner = cycle()
    clocks = FakeClock(), FakeClock()
    model = PacedModel(inner, clocks[0])
    first = dict(costs_of(model, max_rows=8, clock=clocks[0]))
    second = dict(costs_of(model, max_rows=8, clock=clocks[1]))
    assert first[8] == pytest.approx(memory_bound(8), abs=2 * TICK)
    assert second[8] == pytest.approx(TICK)
    before = clocks[0].seconds
    assert costs_of(model, max_rows=8, clock=clocks[0]) == first
    assert clocks[0].seconds == before, "passes are measured once"


def test_a_measurement_that_raises_closes_its_slot() -> None:
    inner = cycle()

    class Failing(PacedModel):
        def run(self, pass_: object) -> object:
            raise RuntimeError("out of memory")

    model: LanguageModel = Failing(inner, FakeClock())
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_costs(model, max_rows=8)
    assert inner.num_open == 0


def test_a_model_whose_room_another_engine_reserved_is_measured() -> None:
    model = cycle()
    model.reserve(1, 20)
    other = model.open()
    assert measure_costs(model, max_rows=8).keys() == {1, 4, 8}
    model.close(other)


def crowded(rows: int) -> float:
    """Up to eight rows take as long as one; beyond them each takes a pass more."""
    return PASS_SECONDS * max(1, rows - 7)


@pytest.mark.parametrize(("num_others", "drafts"), [(0, True), (7, False)])
def test_sequences_of_other_drafters_count_in_the_cost_of_a_pass(num_others: int, drafts: bool) -> None:
    records: list[RoundRecord] = []
    llm = paced_llm(cycle(), ("ngram", "suffix"), cost=crowded, on_round=records.append)
    for _ in range(2):
        records.clear()
        for index in range(1 + num_others):
            choice = "none" if index else None
            llm.engine.add(*llm.requests.sequences([0, 1, 2, 3, 4, 5, 0, 1], PARAMS, draft=choice))
        while not llm.engine.is_idle:
            llm.engine.step()
    scored = sum(row.num_drafted for record in records for row in record.sequences)
    assert (scored > 30) if drafts else (scored < 15)
