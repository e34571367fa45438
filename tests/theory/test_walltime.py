"""The speed-up formulas, compared with sums, simulations and their own bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.lab.analysis.theory import (
    best_length,
    expected_tokens,
    operations_factor,
    walltime_improvement,
)


@pytest.mark.parametrize(
    ("acceptance", "length", "tokens"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5), (0.5, 3, 1.875), (0.8, 0, 1.0)]
)
def test_expected_tokens_by_hand(acceptance: float, length: int, tokens: float) -> None:
    assert expected_tokens(acceptance, length) == pytest.approx(tokens)


@given(st.floats(0.01, 0.99), st.integers(0, 30))
def test_expected_tokens_is_the_geometric_sum(acceptance: float, length: int) -> None:
    closed = (1 - acceptance ** (length + 1)) / (1 - acceptance)
    assert expected_tokens(acceptance, length) == pytest.approx(closed, rel=1e-9)


def test_expected_tokens_by_simulation() -> None:
    """100000 rounds: the standard error is 0.005."""
    acceptance, length = 0.7, 4
    kept = np.cumprod(np.random.default_rng(1).random((100_000, length)) < acceptance, axis=1).sum(axis=1)
    assert 1 + kept.mean() == pytest.approx(expected_tokens(acceptance, length), abs=0.02)


@given(st.floats(0.0, 0.99), st.floats(0.0, 1.5))
def test_drafting_pays_just_where_acceptance_is_above_cost(acceptance: float, cost: float) -> None:
    length = best_length(acceptance, cost)
    if acceptance > cost + 1e-9:
        assert length > 0
        assert walltime_improvement(acceptance, length, cost) >= (1 + acceptance) / (1 + cost) - 1e-12
    elif acceptance < cost - 1e-9:
        assert length == 0
    assert walltime_improvement(acceptance, 0, cost) == 1.0


def test_walltime_and_operations_by_hand() -> None:
    assert walltime_improvement(0.5, 3, 0.1) == pytest.approx(1.875 / 1.3)
    assert operations_factor(0.5, 3, 0.1) == pytest.approx((0.3 + 3 + 1) / 1.875)
    assert operations_factor(1.0, 3, 0.0) == 1.0


def test_best_length_by_hand() -> None:
    assert best_length(0.8, 0.05) == max(range(65), key=lambda n: walltime_improvement(0.8, n, 0.05))
    assert best_length(1.0, 0.1, longest=12) == 12
    assert best_length(0.3, 0.3) == 0


@pytest.mark.parametrize(("acceptance", "length"), [(-0.1, 1), (1.1, 1), (0.5, -1), (float("nan"), 1)])
def test_senseless_arguments_are_refused(acceptance: float, length: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        expected_tokens(acceptance, length)
