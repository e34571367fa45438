"""Draft lengths that follow acceptance, with hand-made rounds."""

from __future__ import annotations

from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw
from draftree.core.types import Budget, RoundRecord, SequenceRecord
from draftree.drafters.tree_builder.builder import TreeBuilder, parse_shape
from draftree.drafters.tree_builder.model_stepper import ModelStepper
from draftree.models.table import TableLM, listed
from draftree.planners import PLANNERS
from draftree.planners.base import Planner
from views import view_of


def planner(spec: str, *, depth: int = 5, nodes: int = 5) -> Planner[Any]:
    cls, config = PLANNERS.configure(PLANNERS.parse(spec)[0])
    return cls(config, default_depth=depth, default_nodes=nodes)


def round_of(*rows: tuple[int, int]) -> RoundRecord:
    """A round: for each sequence how deep it drafted and how much of that was accepted."""
    records = tuple(SequenceRecord("r", 9, d, d, a, a + 1, a) for d, a in rows)
    return RoundRecord(0, 0, 0, 0, 0, 0, 1, records)


@pytest.mark.parametrize(
    ("spec", "rounds", "depths"),
    [
        ("heuristic", [(5, 5), (7, 7), (9, 3), (8, 0), (7, 7)], [5, 7, 9, 8, 7, 9]),
        ("additive", [(5, 5), (6, 6), (7, 3), (6, 0), (5, 5)], [5, 6, 7, 6, 5, 6]),
        ("heuristic,start=1", [(1, 0), (1, 0), (1, 1), (3, 3)], [1, 1, 1, 3, 5]),
        ("additive,start=2", [(2, 1), (1, 0), (1, 1)], [2, 1, 1, 2]),
        ("fixed", [(5, 0), (5, 5)], [5, 5, 5]),
        ("fixed:3", [(3, 0), (3, 3)], [3, 3, 3]),
        ("threshold", [(5, 0), (5, 5)], [5, 5, 5]),
        ("threshold:0.4,k=7", [(7, 0)], [7, 7]),
        # a round without a draft teaches nothing, nor does a short draft that was accepted whole shorten
        ("heuristic", [(0, 0), (2, 2), (4, 4)], [5, 5, 5, 6]),
        ("additive", [(0, 0), (2, 2), (4, 4)], [5, 5, 5, 5]),
    ],
)
def test_lengths_by_hand(spec: str, rounds: list[tuple[int, int]], depths: list[int]) -> None:
    plan = planner(spec)
    states = [plan.open()]
    found = [plan.budgets(states)[0].depth]
    for row in rounds:
        plan.observe(states, round_of(row))
        found.append(plan.budgets(states)[0].depth)
    assert found == depths


@pytest.mark.parametrize("spec", ["heuristic", "additive"])
def test_each_sequence_has_a_length_of_its_own(spec: str) -> None:
    plan = planner(spec)
    states = [plan.open(), plan.open()]
    for _ in range(3):
        depths = [budget.depth for budget in plan.budgets(states)]
        plan.observe(states, round_of((depths[0], depths[0]), (depths[1], 0)))
    good, bad = (budget.depth for budget in plan.budgets(states))
    assert good > 5 > bad == 2


def test_a_threshold_is_passed_on_and_zero_is_off() -> None:
    assert planner("threshold").budgets([None]) == [Budget(5, 5, 0.4)]
    assert planner("threshold:0.75").budgets([None]) == [Budget(5, 5, 0.75)]
    assert planner("threshold:0").budgets([None]) == [Budget(5, 5, 0.0)]


def test_a_branching_drafter_gets_all_its_nodes() -> None:
    assert planner("fixed", depth=3, nodes=14).budgets([None]) == [Budget(14, 3)]
    assert planner("fixed:2", depth=3, nodes=14).budgets([None]) == [Budget(14, 2)]
    assert planner("fixed:0", depth=3, nodes=14).budgets([None]) == [Budget(0, 0)]
    assert planner("fixed:20", depth=3, nodes=14).budgets([None]) == [Budget(20, 20)]


@pytest.mark.parametrize(
    "spec", ["fixed:-1", "heuristic,start=0", "additive,start=-2", "threshold:1.5", "threshold,k=0"]
)
def test_settings_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(ConfigurationError):
        planner(spec)


def test_a_drafter_stops_where_it_is_not_sure() -> None:
    sure, unsure = [0.9, 0.05, 0.05], [0.4, 0.35, 0.25]
    # the first guess is sure, the second is not: it is kept, and nothing is guessed after it
    model = TableLM(listed({(2,): sure, (2, 0): unsure}, sure))
    growth = TreeBuilder(ModelStepper(model), shape=parse_shape("chain", None), draw=Draw.FREE, shares_noise=True)
    view = view_of([2], vocab_size=3, temperature=0)
    lengths = [len(growth.grow([growth.stepper.open(view)], [Budget(5, 5, c)])[0]) for c in (0.0, 0.39, 0.41, 0.95)]
    assert lengths == [5, 5, 2, 1]
