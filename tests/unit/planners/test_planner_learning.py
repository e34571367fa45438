"""Estimates of the planner `adaptive`: costs of passes and drafts, and acceptance of nodes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from draftree.core.tree import TokenTree, chain
from draftree.core.types import DraftPart
from draftree.planners.estimates.constants import AUTO
from draftree.planners.estimates.costs import DraftCosts, PassCosts
from draftree.planners.estimates.gains import Acceptance, SequenceAcceptance
from draftree.planners.estimates.plans import PartPlan


@pytest.mark.parametrize("seed", range(5))
def test_a_curve_is_straight_between_measured_passes_and_never_falls(seed: int) -> None:
    dice = random.Random(seed)
    rows = sorted(dice.sample(range(1, 40), 4))
    seconds = sorted(dice.uniform(0.01, 0.1) for _ in rows)
    costs = PassCosts()
    costs.learn(dict(zip(rows, seconds, strict=True)))
    curve = costs.curve(1, 50, max_rows=rows[-1])
    assert np.allclose(curve, np.interp(range(rows[-1] + 1), rows, seconds))
    assert costs.curve(1, 50, max_rows=rows[-1] + 10)[-1] > seconds[-1]


def at(costs: PassCosts, rows: int, batch: int = 1, prefix: int = 100) -> float:
    return costs.curve(batch, prefix, max_rows=64)[rows]


def test_one_slow_measurement_is_ignored_if_more_rows_cost_less() -> None:
    costs = PassCosts()
    costs.learn({1: 0.1, 4: 0.5, 8: 0.12})
    assert at(costs, 4) == pytest.approx(0.12)


def test_rounds_teach_what_was_not_measured_and_the_machine_may_slow_down() -> None:
    costs = PassCosts()
    costs.learn({1: 0.1, 16: 0.1})
    for _ in range(60):
        costs.observe(1, 1, 100, seconds=0.2, is_plain=True)
        costs.observe(9, 1, 100, seconds=0.3)
    assert at(costs, 1) == pytest.approx(0.2, rel=0.1)
    assert at(costs, 9) == pytest.approx(0.3, rel=0.1)


def test_without_measurements_the_first_rounds_set_the_scale() -> None:
    costs = PassCosts()
    for _ in range(5):
        costs.observe(1, 1, 50, seconds=0.03)
    assert at(costs, 1) == pytest.approx(0.03, rel=0.05)
    assert 0.03 <= at(costs, 5) <= 0.04


def test_a_new_batch_size_begins_where_the_last_one_was_and_learns_its_own() -> None:
    costs = PassCosts()
    costs.learn({1: 0.1, 64: 0.2})
    for _ in range(40):
        costs.observe(4, 4, 100, seconds=0.3, is_plain=True)
    assert at(costs, 4, batch=4) == pytest.approx(0.3, rel=0.1)
    assert at(costs, 5, batch=5) == pytest.approx(0.3, rel=0.15)
    for _ in range(40):
        costs.observe(5, 5, 100, seconds=0.1, is_plain=True)
    assert at(costs, 5, batch=5) == pytest.approx(0.1, rel=0.15)
    assert at(costs, 4, batch=4) == pytest.approx(0.3, rel=0.1)


def test_curves_never_fall() -> None:
    costs, dice = PassCosts(), random.Random(1)
    costs.learn({1: 0.1, 64: 0.2})
    for _ in range(200):
        costs.observe(dice.randrange(1, 60), 1, 100, seconds=dice.uniform(0.05, 0.4))
    curve = costs.curve(1, 100, max_rows=64)
    assert list(curve) == sorted(curve)


def test_a_draft_with_catch_up_does_not_measure_a_level() -> None:
    costs = DraftCosts()
    costs.observe(5.0, 3, unread=100)
    assert not costs.by_depth
    for _ in range(50):
        costs.observe(0.3, 3, unread=2)
    assert costs.of(2, otherwise=9.0) == pytest.approx(0.2, rel=0.05)
    assert costs.is_below(0.02, 20.0)
    assert not costs.is_below(0.02, 10.0)


def test_a_further_level_may_cost_less_than_the_first() -> None:
    costs = DraftCosts()
    assert costs.of(3, otherwise=2.0) == 6.0
    for _ in range(20):
        costs.observe(0.8, 1, unread=0)
    assert costs.of(3) == pytest.approx(2.4)
    for _ in range(20):
        costs.observe(1.0, 2, unread=0)
    assert [costs.of(depth) for depth in range(5)] == pytest.approx([0.0, 0.8, 1.0, 1.2, 1.4])
    for _ in range(200):  # everything is slower
        costs.observe(2.0, 2, unread=0)
    assert [costs.of(depth) for depth in range(5)] == pytest.approx([0.0, 1.6, 2.0, 2.4, 2.8], rel=1e-3)
    for _ in range(5):
        costs.observe(6.0, 4, unread=0)
    assert costs.of(3) == pytest.approx(4.0, rel=1e-3)
    assert costs.of(5) == pytest.approx(7.5, rel=1e-3), "no further level costs more than the mean"


def test_one_slow_draft_changes_the_cost_of_no_depth() -> None:
    costs = DraftCosts()
    costs.observe(0.9, 1, unread=0)
    costs.observe(60.0, 4, unread=0)
    assert costs.of(4) == pytest.approx(3.6)
    for seconds in (1.0, 40.0, 1.0, 1.0, 1.0):
        costs.observe(seconds, 1, unread=0)
    assert costs.of(1) == pytest.approx(1.0)
    assert costs.call == pytest.approx(1.0)


def test_a_deeper_draft_never_costs_less_than_a_shallower_one() -> None:
    costs = DraftCosts()
    for _ in range(9):
        costs.observe(1.0, 1, unread=0)
    for _ in range(9):
        costs.observe(0.5, 2, unread=0)
    assert costs.of(2) >= costs.of(1)


def test_a_depth_that_was_slow_long_ago_is_not_avoided_forever() -> None:
    costs = DraftCosts()
    costs.observe(1.0, 1, unread=0)
    for _ in range(4):
        costs.observe(50.0, 3, unread=0)
    assert costs.of(3) > 20
    for _ in range(2 * AUTO.cost_age):
        costs.observe(1.0, 1, unread=0)
    assert costs.of(3) < 4


def test_costs_never_fall_with_the_depth() -> None:
    costs, dice = DraftCosts(), random.Random(3)
    for _ in range(400):
        costs.observe(dice.uniform(0.2, 2.0), dice.randrange(1, 8), unread=0)
        found = [costs.of(depth) for depth in range(10)]
        assert all(value >= 0 for value in found)
    assert found[9] >= found[8] >= found[7]


def test_a_lookup_drafter_may_cost_more_than_a_model_and_still_draft_first() -> None:
    at_once, by_passes = (PartPlan.of(DraftPart("d", 4, 4, runs_model=runs)) for runs in (False, True))
    assert not at_once.is_cheap(1.0, 1)
    for plan in (at_once, by_passes):
        plan.observe_costs(0.05, 4, unread=[0])
    assert at_once.is_cheap(1.0, 1)
    assert not by_passes.is_cheap(1.0, 1)
    assert not at_once.is_cheap(0.2, 1)


def test_a_lookup_drafter_takes_its_time_for_every_sequence() -> None:
    plan = PartPlan.of(DraftPart("d", 4, 4, runs_model=False))
    for _ in range(40):
        plan.observe_costs(0.1, 4, unread=[0, 0])
    assert plan.sequence_seconds == pytest.approx(0.05)
    assert plan.is_cheap(1.0, 2)
    assert not plan.is_cheap(1.0, 4)
    assert plan.is_cheap(2.0, 4)


def teach(acceptance: Acceptance, tree: TokenTree, right: float, rounds: int = 400) -> SequenceAcceptance:
    """Verdicts on a chain whose every node is right with this chance behind its parent."""
    dice, own = random.Random(0), SequenceAcceptance()
    for _ in range(rounds):
        path: list[int] = []
        while len(path) < len(tree) and dice.random() < right:
            path.append(len(path))
        acceptance.observe(own, tree, path)
    return own


@pytest.mark.parametrize("right", [0.05, 0.5, 0.95])
def test_a_drafter_that_is_too_sure_is_corrected(right: float) -> None:
    acceptance = Acceptance(200)
    tree = chain([1, 2], scores=[math.log(0.75), 2 * math.log(0.75)])
    teach(acceptance, tree, right)
    first, second = acceptance.survivals(SequenceAcceptance(), tree)
    assert first == pytest.approx(right, abs=0.1)
    assert second == pytest.approx(right**2, abs=0.12)


def test_bins_of_a_score_are_independent() -> None:
    acceptance = Acceptance(200)
    for sure, right in ((0.9, 0.9), (0.3, 0.1)):
        teach(acceptance, chain([1], scores=[math.log(sure)]), right)
    chances = [acceptance.survivals(SequenceAcceptance(), chain([1], scores=[math.log(s)]))[0] for s in (0.9, 0.3)]
    assert chances == pytest.approx([0.9, 0.1], abs=0.08)


def test_survival_never_rises_along_a_path() -> None:
    acceptance = Acceptance(50)
    tree = TokenTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, -1, 4))
    teach(acceptance, chain([1, 2, 3]), 0.9)
    survivals = acceptance.survivals(SequenceAcceptance(), tree)
    assert all(parent < 0 or survivals[node] <= survivals[parent] for node, parent in enumerate(tree.parents))


def test_a_sequence_of_its_own_kind_is_told_apart_and_a_new_one_is_not() -> None:
    acceptance, tree = Acceptance(80), chain([1])
    good, bad, dice = SequenceAcceptance(), SequenceAcceptance(), random.Random(2)
    for _ in range(100):
        acceptance.observe(good, tree, [0] if dice.random() < 0.9 else [])
        acceptance.observe(bad, tree, [0] if dice.random() < 0.2 else [])
    high, middle, low = (acceptance.survivals(own, tree)[0] for own in (good, SequenceAcceptance(), bad))
    assert high > middle + 0.1 > low + 0.3


def test_nodes_after_a_wrong_one_teach_nothing() -> None:
    acceptance = Acceptance(50)
    deep = chain([1, 2, 3, 4])
    before = acceptance.survivals(SequenceAcceptance(), deep)
    for _ in range(50):
        acceptance.observe(SequenceAcceptance(), deep, [])
    after = acceptance.survivals(SequenceAcceptance(), deep)
    assert after[0] < 0.1
    # a second node's probability given its parent is unchanged
    assert after[1] / after[0] == pytest.approx(before[1] / before[0], abs=0.01)
