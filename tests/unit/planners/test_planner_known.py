"""The default planner over drafters whose acceptance was measured before, such as trained heads."""

from __future__ import annotations

import random

import pytest

from draftree.core.tree import EMPTY, TokenTree, chain
from draftree.core.types import DraftPart, RoundRecord, SequenceRecord
from draftree.planners.adaptive import AdaptivePlanner
from planned_tables import FLAT, lone

KNOWN = (0.68, 0.69, 0.72, 0.69)
"""Acceptance by training: 1.7 tokens of four levels."""


@pytest.mark.parametrize("claims", [None, 0.6])
def test_a_drafter_with_known_acceptance_drafts_from_the_first_rounds_on(claims: float | None) -> None:
    short = {"rates": KNOWN, "claims": claims, "depth": 4}
    table = lone(FLAT, 0.6, level=0.008, **short)
    table.play(40)
    assert all(budget.num_nodes for budget in table.budgets)
    later = lone(FLAT, 0.6, level=0.008, **short).play(100).play(600).speedup
    speeds = []
    for seed in range(10):
        table = lone(FLAT, 0.6, level=0.008, **short)
        table.dice = random.Random(seed)
        speeds.append(table.texts(1, 60)[0])
    assert sum(speeds) / len(speeds) > 0.95 * later


def test_some_misses_do_not_turn_off_a_drafter_with_known_acceptance() -> None:
    table = lone(FLAT, 0.0, level=0.01, rates=KNOWN)
    table.play(4)
    assert all(budget.num_nodes for budget in table.budgets)


@pytest.mark.parametrize("claims", [None, 0.65])
@pytest.mark.parametrize("level", [0.01, 0.03])
def test_a_drafter_that_is_worse_than_was_measured_is_turned_off(level: float, claims: float | None) -> None:
    first, *others = lone(FLAT, 0.0, level=level, rates=KNOWN, claims=claims).texts(12, 60)
    assert first > 0.83
    assert sum(others[2:]) / len(others[2:]) > 0.975


@pytest.mark.parametrize("slow", [frozenset({0}), frozenset({1}), frozenset({3}), frozenset({0, 5, 11})])
def test_slow_rounds_do_not_stop_drafts(slow: frozenset[int]) -> None:
    table = lone(FLAT, 0.7, level=0.008, rates=KNOWN, depth=4, slow=slow)
    table.play(40)
    assert sum(budget.depth >= 2 for budget in table.budgets[12:]) >= 26


def test_sampled_texts_are_judged_by_rates_and_drafts_of_their_own() -> None:
    part = DraftPart("d", 3, 3, greedy_rates=(0.8, 0.5), sampled_rates=(0.4, 0.5))
    planner = AdaptivePlanner(AdaptivePlanner.Config(), default_depth=3, parts=[part])
    planner.learn_costs(FLAT)
    sampled = planner.open(is_sampled=True)
    for _ in range(40):
        planner.budgets([sampled])
        row = SequenceRecord("r", 9, 1, 1, 0, 1, 0, drafted=chain([1]), tree=chain([1]), bonus=2)
        planner.observe([sampled], RoundRecord(0, 0.001, 0.1, 0, 0, 0.101, 2, (row,)))
    greedy, other = planner.open(), planner.open(is_sampled=True)
    assert planner._rates(0, greedy) == pytest.approx([0.8, 0.5, 0.5])
    assert planner._rates(0, other)[0] < 0.2, "what was measured before was wrong"


def test_a_calibrated_drafter_stops_where_a_level_costs_more_than_it_gains() -> None:
    limits = []
    for level in (0.002, 0.01, 0.03):
        table = lone(FLAT, 0.7, level=level, rates=KNOWN, claims=0.7)
        table.play(60)
        limits.append(table.budgets[-1].min_survival)
    assert 0 < limits[0] < limits[1] < limits[2] <= 1
    assert not lone(FLAT, 0.7, level=0.01).play(60).budgets[-1].min_survival


def test_a_level_that_was_never_accepted_ends_the_draft() -> None:
    table = lone(FLAT, 0.7, level=0.002, rates=(0.9, 0.0, 0.0), claims=0.7)
    assert table.play(3).budgets[-1].min_survival == 1.0


def test_a_drafter_with_a_model_drafts_beside_a_lookup_if_it_adds_something() -> None:
    parts = [
        DraftPart("head", 2, 2, greedy_rates=(0.7, 0.7), is_calibrated=True),
        DraftPart("lookup", 4, 4, runs_model=False),
    ]
    planner = AdaptivePlanner(AdaptivePlanner.Config(), default_depth=4, default_nodes=6, parts=parts)
    planner.learn_costs(FLAT)
    state = planner.open()
    tree = TokenTree((1, 2), (-1, 0), (-0.4, -0.8), sources=(("head", "lookup"), ("head",)))
    for _ in range(8):
        budget = planner.budgets([state])[0]
        planner.trim([state], [tree], draft_seconds=0.021)
        row = SequenceRecord("r", 9, 2, 2, 1, 2, 1, drafted=tree, tree=tree, path=(0,), bonus=1)
        planner.observe([state], RoundRecord(0, 0.021, 0.1, 0, 0, 0.121, 3, (row,), (0.02, 0.001)))
    condition, free = budget.conditions
    assert free is None
    assert condition is not None
    assert condition.is_met([EMPTY])
    assert not condition.is_met([chain([1, 2, 3, 4], scores=[-0.01, -0.02, -0.03, -0.04])])


def test_a_skipped_draft_teaches_nothing() -> None:
    parts = [DraftPart("head", 2, 2, greedy_rates=(0.7, 0.7)), DraftPart("lookup", 4, 4, runs_model=False)]
    planner = AdaptivePlanner(AdaptivePlanner.Config(), default_depth=4, default_nodes=6, parts=parts)
    planner.learn_costs(FLAT)
    state = planner.open()
    both = TokenTree((1, 2, 1), (-1, 0, -1), sources=(("head",), ("head",), ("lookup",)))
    only = TokenTree((1, 2), (-1, 0), sources=(("lookup",), ("lookup",)))
    depths = []
    for number in range(60):
        depths.append(planner.budgets([state])[0].part_depths[0])
        tree, seconds = (both, (0.02, 0.001)) if number < 8 else (only, (0.000001, 0.001))
        planner.trim([state], [tree], draft_seconds=sum(seconds))
        row = SequenceRecord("r", 9, len(tree), 2, 2, 3, 2, drafted=tree, tree=tree, path=(0, 1), bonus=1)
        total = 0.1 + sum(seconds)
        planner.observe([state], RoundRecord(0, sum(seconds), 0.1, 0, 0, total, 1 + len(tree), (row,), seconds))
    assert all(depths[8:])
    assert "head: a draft level costs 0.1" in planner.explain()


def test_a_useless_drafter_is_tried_less_and_less_and_found_again_when_it_pays() -> None:
    lost, found_again = [], []
    for seed in range(4):
        table = lone(FLAT, 0.0, level=0.01, dice=random.Random(seed))
        lost.append(sum(100 * (1 - speed) for speed in table.texts(40, 100)))
        table.right = {"d": (0.7,)}
        found_again.append(max(table.texts(4, 100)))
    assert sum(lost) / 4 < 12, "passes in 4,000; trials may take 40"
    assert sum(found_again) / 4 > 1.7
