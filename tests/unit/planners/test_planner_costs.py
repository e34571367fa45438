"""Curves of pass times interpolate linearly between measurements."""

from __future__ import annotations

import random

import numpy as np
import pytest

from draftree.planners.estimates.costs import PassCosts


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


def test_a_pass_is_never_dearer_than_one_with_more_rows() -> None:
    costs = PassCosts()
    costs.learn({1: 0.03, 8: 0.02, 16: 0.05})
    assert costs.curve(1, 50, max_rows=16)[:9] == pytest.approx([0.02] * 9)


def test_rounds_bend_the_curve_towards_what_they_took() -> None:
    costs = PassCosts()
    costs.learn({1: 0.01, 8: 0.02})
    for _ in range(60):
        costs.observe(1, 1, 50, seconds=0.02, is_plain=True)
        costs.observe(8, 1, 50, seconds=0.03)
    curve = costs.curve(1, 50, max_rows=8)
    assert (curve[1], curve[8]) == pytest.approx((0.02, 0.03), rel=0.05)
    assert curve[1] < curve[4] < curve[8]
