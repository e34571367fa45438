"""The default planner over several drafters that run a model: one drafts in a round, and what they lose is bounded."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from draftree.planners.adaptive import AUTO
from planned_tables import FLAT, STEEP, Table

RECORD = (0.7, 0.7, 0.7)


def rivals(costs: dict[int, float] = FLAT, *, seed: int = 0, record: str = "", **right: float) -> Table:
    """Drafters with this acceptance, each level of which costs a fifth of a pass; one may have a better record."""
    parts = {name: (chance,) for name, chance in right.items()}
    table = Table(costs, parts, dict.fromkeys(parts, 0.02), depth=4, rates={record: RECORD} if record else {})
    table.dice = random.Random(seed)
    return table


def test_one_drafts_in_a_round_and_the_better_one_in_most() -> None:
    table = rivals(worse=0.4, better=0.8)
    table.play(60).play(300)
    drafted = [[depth > 0 for depth in budget.part_depths] for budget in table.budgets]
    assert all(sum(parts) <= 1 for parts in drafted)
    assert sum(better for _, better in drafted) > 270
    assert any(worse for worse, _ in drafted), "it is tried again"
    assert [standing.is_on for standing in table.planner.standings()] == [False, True]


def test_a_better_drafter_is_found_behind_one_whose_record_is_wrong() -> None:
    speeds = [rivals(seed=seed, record="first", first=0.0, second=0.75).texts(4, 80) for seed in range(10)]
    assert fmean(speed for _, *later in speeds for speed in later) > 1.25


@pytest.mark.parametrize("record", ["", "a"])
@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
def test_three_useless_drafters_cost_little_from_the_first_text_on(costs: dict[int, float], record: str) -> None:
    first, *later = rivals(costs, record=record, a=0.0, b=0.0, c=0.0).texts(4, 100)
    assert first > 0.965
    assert min(later) > 0.97
    assert fmean(later) > 0.98


def test_hidden_states_are_kept_for_the_drafter_that_drafts_and_before_trials_only() -> None:
    table = rivals(a=0.0, b=0.0)
    kept, drafted = [], []
    for _ in range(400):
        table.play(1)
        drafted.append(bool(table.budgets[0].depth))
        kept.append(table.planner.needs_states())
    assert sum(kept[100:]) < 0.35 * 300
    trials = [number for number in range(100, 400) if drafted[number]]
    assert trials
    assert all(all(kept[number - AUTO.context_rounds + 2 : number]) for number in trials)
    table = rivals(a=0.9)
    table.play(50)
    assert table.planner.needs_states()


def test_what_was_lost_is_no_reason_against_a_drafter_that_becomes_right() -> None:
    table = rivals(a=0.0, b=0.0)
    table.texts(10, 80)
    table.right = {"a": (0.0,), "b": (0.9,)}
    assert fmean(table.texts(6, 80)) > 1.5


def test_a_released_drafter_is_not_planned_and_the_reason_is_given() -> None:
    table = rivals(good=0.8, bad=0.1)
    table.play(40)
    table.planner.release(1, "slower than 'good'")
    table.play(200)
    assert not any(budget.part_depths[1] for budget in table.budgets)
    assert [standing.part for standing in table.planner.standings()] == [0]
    assert table.planner.explain().endswith("bad: released, slower than 'good'")


def test_drafts_of_a_folder_in_a_folder_count_for_the_inner_one() -> None:
    planner = rivals(**{"head:/m": 0.5, "head:/m/heads/a": 0.5}).planner
    assert planner._owners(("head:/m/heads/a",)) == [1]
    assert planner._owners(("head:/m",)) == [0]
