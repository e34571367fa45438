"""Estimates of the planner `adaptive`: costs of passes and drafts, and acceptance of nodes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from draftree.core.tree import TokenTree, chain
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.planners.adaptive import Acceptance, AdaptivePlanner, Kind, OwnOdds, SequenceEstimates
from draftree.planners.estimates.costs import COSTS, DraftCosts, PassCosts


@pytest.mark.parametrize("seed", range(5))
def test_a_curve_is_straight_between_measured_passes_and_never_falls(seed: int) -> None:
    dice = random.Random(seed)
    rows = sorted(dice.sample(range(1, 40), 4))
    seconds = sorted(dice.uniform(0.01, 0.1) for _ in rows)
    costs = PassCosts()
    costs.learn(dict(zip(rows, seconds, strict=True)))
    assert np.allclose(costs.curve(1, rows[-1] - 1), np.interp(range(1, rows[-1] + 1), rows, seconds))
    assert costs.curve(1, rows[-1] + 10)[-1] > seconds[-1]


def at(costs: PassCosts, rows: int, batch: int = 1) -> float:
    return costs.plain(batch) if rows == batch else costs.curve(batch, rows - batch)[-1]


def test_one_slow_measurement_is_ignored_if_more_rows_cost_less() -> None:
    costs = PassCosts()
    costs.learn({1: 0.1, 4: 0.5, 8: 0.12})
    assert at(costs, 4) == pytest.approx(0.12)


def test_rounds_teach_what_was_not_measured_and_the_machine_may_slow_down() -> None:
    costs = PassCosts()
    costs.learn({1: 0.1, 16: 0.12})
    for _ in range(100):
        costs.observe(1, 1, 100, seconds=0.2, is_plain=True)
        costs.observe(9, 1, 100, seconds=0.3)
    assert at(costs, 1) == pytest.approx(0.2, rel=0.05)
    assert at(costs, 9) == pytest.approx(0.3, rel=0.05)


def test_costs_that_vary_are_compared_with_those_that_vary_less() -> None:
    dice = random.Random(1)
    costs, draft = PassCosts(), DraftCosts()
    costs.learn({1: 0.1, 4: 0.12})
    for _ in range(200):
        costs.observe(1, 1, 100, seconds=0.1 * dice.uniform(0.99, 1.01), is_plain=True)  # a share of a call
        costs.observe(4, 1, 100, seconds=0.15 * dice.uniform(0.85, 1.15))
        draft.observe(0.03 * dice.uniform(0.85, 1.15), 2)
    assert at(costs, 4) / at(costs, 1) == pytest.approx(1.5, rel=0.03)
    assert draft.of(2) == pytest.approx(0.03, rel=0.1)


def test_what_a_first_draft_lost_is_forgotten_at_once() -> None:
    draft = DraftCosts()
    for seconds in (0.08, 0.02, 0.02):
        draft.observe(seconds, 1)
    assert draft.of(1) == pytest.approx(0.02)


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_slower_machine_slows_rounds_that_were_not_seen_as_well(*, is_plain: bool) -> None:
    costs = PassCosts()
    costs.learn({1: 0.1, 16: 0.2})
    for _ in range(COSTS.settled_rounds):
        costs.observe(4, 1, 100, seconds=0.144)
        costs.observe(1, 1, 100, seconds=0.1, is_plain=True)
    for _ in range(100):
        costs.observe(1 if is_plain else 4, 1, 100, seconds=0.2 if is_plain else 0.288, is_plain=is_plain)
    # a dozen rounds tell a slower machine from a pass that a draft slows down
    assert 0.12 < at(costs, 1) < 0.21
    assert 0.17 < at(costs, 4) < 0.3


def test_further_rows_may_cost_more_than_was_measured() -> None:
    costs = PassCosts()
    costs.learn({1: 0.1, 16: 0.13})
    for _ in range(100):
        costs.observe(2, 1, 100, seconds=0.104)
        costs.observe(16, 1, 100, seconds=0.16)
    assert at(costs, 16) == pytest.approx(0.16, rel=0.03)
    assert at(costs, 2) == pytest.approx(0.104, rel=0.03)


def test_rows_that_seemed_free_in_a_disturbance_get_their_cost() -> None:
    """A single row was measured while the machine was busy, so that eight seemed to cost as much."""
    costs = PassCosts()
    costs.learn({1: 0.2, 4: 0.14, 8: 0.1})
    for _ in range(60):
        costs.observe(1, 1, 100, seconds=0.05, is_plain=True)
        costs.observe(2, 1, 100, seconds=0.057)
        costs.observe(8, 1, 100, seconds=0.1)
    assert at(costs, 2) == pytest.approx(0.057, rel=0.1)
    assert at(costs, 8) == pytest.approx(0.1, rel=0.1)


def test_without_measurements_the_first_rounds_set_the_scale() -> None:
    costs = PassCosts()
    for _ in range(5):
        costs.observe(1, 1, 50, seconds=0.03)
    assert at(costs, 1) == pytest.approx(0.03, rel=0.05)
    assert 0.03 <= at(costs, 5) <= 0.04


def test_a_new_batch_size_begins_where_the_last_one_was_and_learns_its_own() -> None:
    costs = PassCosts()
    costs.learn({1: 0.1, 64: 0.2})
    for _ in range(80):
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
    curve = costs.curve(1, 63)
    assert curve == sorted(curve)


def test_a_draft_with_catch_up_does_not_measure_a_level() -> None:
    costs = DraftCosts()
    costs.observe(5.0, 3, unread=100)
    assert costs.of(3) == 0.0
    for _ in range(50):
        costs.observe(0.3, 3, unread=2)
    assert costs.of(2) == pytest.approx(0.2, rel=0.05)
    assert costs.catching_up(200) == pytest.approx(5.0)


def test_a_further_level_may_cost_less_than_the_first() -> None:
    costs = DraftCosts()
    for _ in range(20):
        costs.observe(0.8, 1)
    assert costs.of(3) == pytest.approx(2.4)
    for _ in range(20):
        costs.observe(1.0, 2)
    assert [costs.of(depth) for depth in range(5)] == pytest.approx([0.0, 0.8, 1.0, 1.2, 1.4])
    for _ in range(200):  # everything is slower
        costs.observe(2.0, 2)
    assert costs.of(2) == pytest.approx(2.0)
    assert costs.of(1) > 1.2
    for _ in range(200):
        costs.observe(6.0, 4)
    assert costs.of(5) <= 7.5, "no further level costs more than the first"


def test_slow_drafts_change_costs_little_and_faster_ones_count_at_once() -> None:
    """The first draft of a process is often slow, and so is any draft of a busy machine."""
    costs = DraftCosts()
    costs.observe(40.0, 1)
    costs.observe(0.9, 1)
    assert costs.of(4) == pytest.approx(3.6)
    for seconds in (1.0, 40.0, 1.0, 60.0, 1.0):
        costs.observe(seconds, 1)
    assert costs.of(1) == pytest.approx(1.0, rel=0.05)


def test_costs_never_fall_with_the_depth() -> None:
    costs, dice = DraftCosts(), random.Random(3)
    for _ in range(400):
        costs.observe(dice.uniform(0.2, 2.0), dice.randrange(1, 8))
        depths = [costs.of(depth) for depth in range(10)]
        assert depths[0] == 0.0
        assert depths == sorted(depths)


def planner_of(*, memory: float = 80.0, depth: int = 8) -> AdaptivePlanner:
    planner = AdaptivePlanner(AdaptivePlanner.Config(memory=memory), default_depth=depth)
    planner.learn_costs({1: 0.1, 16: 0.1})
    return planner


def teach(planner: AdaptivePlanner, tree: TokenTree, right: float, rounds: int = 400) -> SequenceEstimates:
    """Verdicts on a chain whose every node is right with this chance behind its parent."""
    dice, state = random.Random(0), planner.open()
    for _ in range(rounds):
        count = 0
        while count < len(tree) and dice.random() < right:
            count += 1
        observe(planner, state, tree, count)
    return state


def observe(planner: AdaptivePlanner, state: SequenceEstimates, tree: TokenTree, count: int) -> None:
    """One round whose tree is scored and accepted up to a level."""
    planner.budgets([state])
    row = SequenceRecord(
        "r",
        9,
        len(tree),
        len(tree),
        count,
        count + 1,
        count,
        drafted=tree,
        tree=tree,
        path=tuple(range(count)),
        bonus=0,
    )
    planner.observe([state], RoundRecord(0, 0.001, 0.1, 0, 0, 0.101, 1 + len(tree), (row,)))


def survivals(planner: AdaptivePlanner, state: SequenceEstimates, tree: TokenTree) -> list[float]:
    return planner._survivals_in(state, tree)


@pytest.mark.parametrize("right", [0.05, 0.5, 0.95])
def test_a_drafter_that_is_too_sure_is_corrected(right: float) -> None:
    planner = planner_of(memory=200)
    tree = chain([1, 2], scores=[math.log(0.75), 2 * math.log(0.75)])
    teach(planner, tree, right, 3000)
    first, second = survivals(planner, planner.open(), tree)
    assert first == pytest.approx(right, abs=0.12)
    assert second == pytest.approx(right**2, abs=0.14)


def test_survival_never_rises_along_a_path() -> None:
    planner = planner_of(memory=50)
    tree = TokenTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, -1, 4))
    teach(planner, chain([1, 2, 3]), 0.9)
    found = survivals(planner, planner.open(), tree)
    assert all(parent < 0 or found[node] <= found[parent] for node, parent in enumerate(tree.parents))


def test_kinds_of_nodes_and_sequences_are_told_apart() -> None:
    acceptance, dice = Acceptance(200), random.Random(2)
    likely, unlikely = Kind((), 1, 0.9, 3), Kind((), 2, 0.3, 3)
    good: OwnOdds = {}
    bad: OwnOdds = {}
    for _ in range(300):
        acceptance.observe(likely, good, hit=dice.random() < 0.95)
        acceptance.observe(likely, bad, hit=dice.random() < 0.6)
        acceptance.observe(unlikely, {}, hit=dice.random() < 0.1)
    high, middle, low = (acceptance.chance(likely, own) for own in (good, None, bad))
    assert high > middle > low
    assert acceptance.chance(unlikely) == pytest.approx(0.1, abs=0.06)


def test_a_node_that_was_not_scored_teaches_as_well() -> None:
    """The bonus shows whether it was right."""
    planner, tree = planner_of(memory=50), chain([7])
    state = planner.open()
    before = survivals(planner, planner.open(), tree)[0]
    for _ in range(30):
        planner.budgets([state])
        row = SequenceRecord("r", 9, 0, 0, 0, 1, 0, drafted=tree, bonus=7)
        planner.observe([state], RoundRecord(0, 0.001, 0.1, 0, 0, 0.101, 1, (row,)))
    assert survivals(planner, planner.open(), tree)[0] > before
