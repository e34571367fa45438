"""Random decisions of verifiers, through an interface that tests can enumerate.

Verifiers that compare two distributions toss coins and draw residual tokens. They use only a `Chance` for both, so that
the exact tests can replace the noise by every outcome with its probability.
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
        """Toss a coin with this probability of True; always True at 1 and more, never at 0."""

    @abstractmethod
    def draw(self, weights: Tensor) -> int:
        """Draw an index with probability proportional to its weight.

        Args:
            weights: shape (n,); nonnegative with a positive sum.
        """


class NoiseChance(Chance):
    """Decisions from a noise stream, numbered from 0. Mutable: one instance serves one verification.

    Args:
        noise: a stream for this round only, independent of the draft's and of the request's own.
        salts: name of that stream within `noise`; if given, it is derived at the first decision.
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
        """Toss a coin: the next uniform is below the probability."""
        return self._uniform() < probability

    def draw(self, weights: Tensor) -> int:
        """Invert the cumulative weights in float64, with 52 bits of the next uniform."""
        cumulated = torch.cumsum(weights.to(torch.float64), dim=0)
        total = cumulated[-1].item()
        # a product that rounds up to the total would give an index after the last weight
        aim = min(total * self._uniform(), math.nextafter(total, 0.0))
        return int(torch.searchsorted(cumulated, aim, right=True))
