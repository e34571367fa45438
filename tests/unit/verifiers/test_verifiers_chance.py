"""Coins and draws from noise: bounds, zeros, and frequencies."""

from __future__ import annotations

import math

import pytest
import torch

from draftree.core.noise import Noise
from draftree.verifiers.base import NoiseSource


class FixedNoise(Noise):
    """A noise whose uniforms are all one number."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        object.__setattr__(self, "seed", 0)
        object.__setattr__(self, "value", value)

    def uniform(self, position: int, index: int = 0) -> float:
        return self.value


ALMOST_ONE = 1 - 2.0**-53
TINY = 2.0**-53


def test_certain_and_impossible_coins() -> None:
    for value in (TINY, 0.5, ALMOST_ONE):
        assert NoiseSource(FixedNoise(value)).accepts(1.0)
        assert not NoiseSource(FixedNoise(value)).accepts(0.0)


@pytest.mark.parametrize(
    ("uniform", "token"), [(TINY, 1), (0.2499, 1), (0.2501, 3), (0.7499, 3), (0.7501, 4), (ALMOST_ONE, 4)]
)
def test_draws_invert_the_cumulated_weights(uniform: float, token: int) -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    assert NoiseSource(FixedNoise(uniform)).draw(weights) == token


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30])
def test_draws_never_leave_the_tokens_with_weight(scale: float) -> None:
    weights = torch.tensor([0.0, 0.3, 0.0, 0.1, 0.7, 0.0, 0.0], dtype=torch.float64) * scale
    for value in (TINY, 0.1, 0.5, 0.9, ALMOST_ONE):
        assert NoiseSource(FixedNoise(value)).draw(weights) in (1, 3, 4)


def test_decisions_are_a_function_of_the_noise() -> None:
    weights = torch.ones(50)

    def decisions(seed: int) -> list[object]:
        chance = NoiseSource(Noise(seed))
        return [chance.draw(weights) if index % 2 else chance.accepts(0.5) for index in range(40)]

    assert decisions(1) == decisions(1)
    assert decisions(1) != decisions(2)


def test_frequencies_are_the_probabilities() -> None:
    """Four standard errors at 4000 coins and draws; later decisions do not repeat earlier ones."""
    rounds = 4_000
    chance = NoiseSource(Noise(5))
    weights = torch.tensor([1.0, 2.0, 5.0])
    heads = sum(chance.accepts(0.3) for _ in range(rounds))
    assert heads / rounds == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / rounds))
    drawn = torch.bincount(torch.tensor([chance.draw(weights) for _ in range(rounds)]), minlength=3) / rounds
    for share, weight in zip(drawn.tolist(), (0.125, 0.25, 0.625), strict=True):
        assert share == pytest.approx(weight, abs=4 * math.sqrt(weight * (1 - weight) / rounds))


def test_a_stream_is_derived_on_first_use() -> None:
    named, made = NoiseSource(Noise(5), "verify", 7), NoiseSource(Noise(5).stream("verify", 7))
    weights = torch.tensor([0.2, 0.5, 0.3])
    assert [named.draw(weights) for _ in range(20)] == [made.draw(weights) for _ in range(20)]
