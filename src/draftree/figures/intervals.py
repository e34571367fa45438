"""Bootstrap intervals over texts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Estimate", "mean", "ratio"]

DRAWS = 2000
LEVEL = 0.95
SEED = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of sums over texts, with the 95% percentile interval of the bootstrap over texts.

    Attributes:
        value: the estimate; NaN if the denominators are 0.
        low: lower end.
        high: upper end.
    """

    value: float
    low: float
    high: float

    @property
    def errors(self) -> tuple[float, float]:
        """Distances from the value to both ends, for error bars."""
        return max(0.0, self.value - self.low), max(0.0, self.high - self.value)

    def row(self, name: str) -> dict[str, float]:
        """Return three columns of a table."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return the sum of the numerators by the sum of the denominators, one of each per text.

    Texts are resampled with replacement, because tokens of one text are not independent. With one text the interval
    is the value itself, which says nothing about other texts. Source: Efron and Tibshirani, 1993, percentile interval.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if below.sum() == 0:
        return Estimate(float("nan"), float("nan"), float("nan"))
    chosen = np.random.default_rng(SEED).integers(0, len(above), (DRAWS, len(above)))
    sums = below[chosen].sum(1)
    drawn = above[chosen].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(above.sum() / below.sum()), float(low), float(high))


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per text."""
    return ratio(values, [1.0] * len(values))
