"""Estimates of the planner `adaptive`: gains of levels and of drafts, and trials."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from draftree.core.tree import TokenTree
from draftree.core.types import DraftPart
from draftree.planners.estimates.constants import AUTO
from draftree.planners.estimates.gains import (
    Credit,
    Credits,
    Prices,
    RecentDrafts,
    TrialSchedule,
    choose_sequences,
    net_gains,
)


def credit(gains: list[float]) -> Credit:
    return Credit(gains, [1.0] * len(gains))


@pytest.mark.parametrize("cost", [0.01, 0.1, 1.0])
def test_waits_between_fruitless_trials_grow_and_their_cost_stays_a_share_of_the_time(cost: float) -> None:
    schedule, trials = TrialSchedule(), []
    for now in range(4000):
        if not schedule.rounds_left(cost, now):
            schedule.record(now, paid=False)
            trials.append(now)
    waits = [later - earlier for earlier, later in pairwise(trials)]
    assert trials[0] == 0
    assert waits == sorted(waits)
    assert waits[1] >= min(AUTO.trials.backoff * (waits[0] - 1), cost / AUTO.trials.least_share)
    assert waits[-1] == math.ceil(cost / AUTO.trials.least_share)
    assert cost * len(trials[1:]) / trials[-1] < AUTO.trials.first_share


def off(gain: float = 0.0) -> RecentDrafts:
    """A sequence whose last trial was just now, and brought nothing."""
    return RecentDrafts(gain, TrialSchedule(fruitless=4, last_round=100))


def test_only_sequences_whose_drafts_pay_have_one() -> None:
    owns, prices = [off(0.5), off(0.05), off(0.0)], Prices(draft=0.1, token=1.0, planning=0.2)
    assert choose_sequences(owns, prices, 101, shared_gain=9.0) == [True, False, False]
    assert not any(own.is_trial for own in owns)


def test_sequences_with_drafts_regain_the_time_of_the_planner_together() -> None:
    prices = Prices(draft=0.1, token=1.0, planning=0.6)
    assert choose_sequences([off(0.5), off(0.0)], prices, 101, shared_gain=9.0) == [False, False]
    assert choose_sequences([off(0.5), off(0.5)], prices, 101, shared_gain=9.0) == [True, True]


def test_the_rows_of_a_batch_are_shared_by_the_drafts_that_caused_them() -> None:
    """Each row costs a quarter of a plain pass over four sequences, as much as a token saves."""
    curve = [0.0, 4.0, 4.0, 4.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    gains = net_gains([credit([0.9]), credit([0.5, 0.3]), credit([])], curve, 4, token_seconds=1.0)
    assert gains == pytest.approx([0.9 - 1, 0.8 - 2, 0.0])


def test_a_node_that_two_guessed_is_credited_to_the_one_that_costs_nothing() -> None:
    credits = Credits([DraftPart("model:x", 3, 3), DraftPart("lookahead", 3, 3)])
    tree = TokenTree((1, 2, 3), (-1, 0, -1), sources=(("model:x", "lookahead/pool"), ("model:x",), ("lookahead/pool",)))
    model, pool = credits.of(tree, [0.5, 0.25, 0.125], costly=[True, False])
    assert model.gains == [0.0, 0.25, 0.0]
    assert pool.gains == [0.625, 0.0, 0.0]
    assert pool.rows == [2.0, 0.0, 0.0]
    assert [credits.depth_of(part, tree) for part in (0, 1)] == [2, 1]
