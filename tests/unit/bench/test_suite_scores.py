"""Scores of suites: means of ratios, their intervals, and texts that were not timed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from draftree.bench.suite.scores import ALL, Entry, scores_of


def entry(category: str, speed: float | None, *, rounds: int = 10, equal: bool = True) -> Entry:
    return Entry(category, 20, rounds, 20, 5, speed, equal)


def test_scores_are_geometric_means_of_prompts_and_then_of_categories() -> None:
    plain = {"a": entry("x", 10.0, rounds=20), "b": entry("x", 20.0, rounds=20), "c": entry("y", 10.0, rounds=20)}
    fast = {"a": entry("x", 20.0), "b": entry("x", 160.0, rounds=5), "c": entry("y", 10.0, equal=False)}
    found = {(one.method, one.category): one for one in scores_of({"plain": plain, "fast": fast})}
    whole, first, second = (found["fast", category] for category in (ALL, "x", "y"))
    assert first.score is not None
    assert second.score is not None
    assert whole.score is not None
    assert first.score.value == pytest.approx(math.sqrt(2 * 8))
    assert second.score.value == pytest.approx(1.0)
    assert whole.score.value == pytest.approx(math.sqrt(4.0)), "the mean of categories, not of prompts"
    assert first.tokens_per_pass.value == pytest.approx(40 / 15)
    assert whole.tokens_per_pass.value == pytest.approx(math.sqrt(40 / 15 * 2.0))
    assert (first.exact, second.exact, whole.exact) == (2, 0, 2)
    assert (first.prompts, whole.prompts) == (2, 3)
    assert first.acceptance == pytest.approx(0.25)
    assert 2.0 == pytest.approx(first.score.low) and first.score.high == pytest.approx(8.0)  # noqa: PT018, SIM300
    assert second.score.low == second.score.high == pytest.approx(1.0)
    plains = found["plain", ALL].score
    assert plains is not None
    assert plains.value == plains.low == plains.high == 1.0


def test_intervals_cover_the_true_value_about_as_often_as_they_say() -> None:
    import numpy as np

    random, hits = np.random.default_rng(0), 0
    for _ in range(60):
        speeds = np.exp(random.normal(0.5, 0.3, 25))
        plain = {str(place): entry("x", 1.0) for place in range(25)}
        fast = {str(place): entry("x", float(speed)) for place, speed in enumerate(speeds)}
        score = next(one for one in scores_of({"plain": plain, "fast": fast}) if one.method == "fast").score
        assert score is not None
        hits += score.low <= math.exp(0.5) <= score.high
    assert 51 <= hits <= 60


def test_texts_that_were_not_timed_are_left_out_of_the_score_only() -> None:
    plain = {"a": entry("x", 10.0), "b": entry("x", None)}
    fast = {"a": entry("x", 20.0), "b": entry("x", None)}
    found = [one for one in scores_of({"plain": plain, "fast": fast}) if one.method == "fast"]
    assert found[0].score is not None
    assert found[0].score.value == pytest.approx(2.0)
    assert found[0].tokens_per_pass.value == pytest.approx(2.0)
    (alone, _) = (one for one in scores_of({"plain": {"b": plain["b"]}}))
    assert alone.score is None


def test_turns_of_a_conversation_are_resampled_together() -> None:
    speeds = {"a": 2.0, "b": 8.0}
    plain = {name + turn: entry("x", 1.0) for name in speeds for turn in ("", "/2")}
    fast = {name + turn: entry("x", speed) for name, speed in speeds.items() for turn in ("", "/2")}
    apart = next(one for one in scores_of({"plain": plain, "fast": fast}) if one.method == "fast")
    joined = [
        {key: replace(one, first_turn=key[:-2] if key.endswith("/2") else None) for key, one in entries.items()}
        for entries in (plain, fast)
    ]
    together = next(one for one in scores_of({"plain": joined[0], "fast": joined[1]}) if one.method == "fast")
    assert apart.score is not None
    assert together.score is not None
    assert (together.score.value, apart.score.value) == pytest.approx((4.0, 4.0))
    assert (together.prompts, together.exact) == (4, 4)
    assert (together.score.low, together.score.high) == pytest.approx((2.0, 8.0)), "one of two conversations twice"
    assert apart.score.high < 8.0, "all four prompts are rarely of one conversation"
