"""Where a rule's own random decisions come from: an interface narrow enough to be enumerated.

Rules that compare two distributions toss coins and draw residual tokens. They take both from a `Chance` and from
nowhere else, so that the exact tests can put every outcome, with its probability, in the place of noise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from draftree.core.noise import Noise


class Chance(ABC):
    """Independent decisions, one after another."""

    @abstractmethod
    def accepts(self, probability: float) -> bool:
        """A coin that shows True with this probability; always at 1 and more, never at 0."""

    @abstractmethod
    def draw(self, weights: Tensor) -> int:
        """An index with probability proportional to its weight; weights are not negative, their sum is positive."""


class NoiseChance(Chance):
    """Decisions out of a noise, numbered from 0. Mutable: one instance serves one verification.

    Args:
        noise: a stream of this round alone, apart from the one that drafted and from the request's own.
        salts: name that stream, where `noise` is another; it is made when a rule first decides by chance.
    """

    __slots__ = ("_noise", "_salts", "_taken")

    def __init__(self, noise: Noise, *salts: int | str) -> None:
        self._noise = noise
        self._salts = salts
        self._taken = 0

    def _uniform(self) -> float:
        if self._salts:
            self._noise, self._salts = self._noise.stream(*self._salts), ()
        value = self._noise.uniform(self._taken)
        self._taken += 1
        return value

    def accepts(self, probability: float) -> bool:
        """A coin: the next uniform lies below the probability."""
        return self._uniform() < probability

    def draw(self, weights: Tensor) -> int:
        """Inverse of the cumulated weights, in float64: 52 bits of the next uniform decide."""
        cumulated = torch.cumsum(weights.to(torch.float64), dim=0)
        total = cumulated[-1].item()
        # a product that rounds up to the total would name an index behind the last weight
        aim = min(total * self._uniform(), math.nextafter(total, 0.0))
        return int(torch.searchsorted(cumulated, aim, right=True))
