"""Gains of the levels of one drafter, for all sequences and for each.

The gain of a level is the summed survival of its scored nodes, so it is the expected number of tokens that the level
adds to a round. Gains are averaged over all sequences; each sequence's own average counts by its number of drafts.
Levels that were not drafted lately lose weight, and deeper ones are then estimated from the ones above them. If the
acceptance of the drafter was measured before, estimates begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.planners.estimates.cheap_drafts import RecentDrafts
from draftree.planners.estimates.constants import AUTO
from draftree.planners.estimates.credit import Credit


@dataclass(slots=True)
class Levels:
    """Averages of each level's gain and rows. Mutated by its methods.

    Attributes:
        gains: tokens a round, by level.
        rows: scored nodes a round, by level.
        weights: drafts that each average counts as.
        reached: share of drafts that had the level; the others stopped before.
        rates: acceptance of each level, given that of the level above, that was measured before; empty if unknown.
        hits: drafts whose first token was accepted.
        expected_hits: how many were expected; gains are corrected by the ratio.
        known_ratio: acceptance of first tokens relative to the first of `rates`.
        num_known: weight in drafts of this ratio.
        last_round: number of the round to which the weights are faded.
    """

    gains: list[float]
    rows: list[float]
    weights: list[float]
    reached: list[float]
    rates: tuple[float, ...] = ()
    hits: float = AUTO.hit_prior
    expected_hits: float = AUTO.hit_prior
    known_ratio: float = 1.0
    num_known: float = AUTO.known_weight
    last_round: int = 0

    @classmethod
    def of_depth(cls, depth: int, rates: Sequence[float] = ()) -> Levels:
        """Averages without an observation."""
        prior = AUTO.known_hit_prior if rates else AUTO.hit_prior
        return cls([0.0] * depth, [1.0] * depth, [0.0] * depth, [1.0] * depth, tuple(rates[:depth]), prior, prior)

    @property
    def hit_ratio(self) -> float:
        """Accepted first tokens over expected ones: averages of expected gains follow a bad drafter late."""
        return self.hits / self.expected_hits

    def observe_hits(self, hits: int, expected: float, *, drafts: int) -> None:
        """Count accepted first tokens, how many were expected, and drafts."""
        if self.rates and drafts:
            self.num_known = min(self.num_known + drafts, AUTO.hit_memory)
            rate = max(self.rates[0], AUTO.min_survival)
            self.known_ratio += (hits / rate - drafts * self.known_ratio) / self.num_known
        self.expected_hits += expected
        self.hits += hits
        if self.expected_hits > AUTO.hit_memory:
            self.hits *= AUTO.hit_memory / self.expected_hits
            self.expected_hits = AUTO.hit_memory

    def observe(self, now: int, credits: Sequence[Credit], depth: int) -> None:
        """Average what drafts of `depth` levels brought in round `now`."""
        self._fade(now - 1)
        count = len(credits)
        for level in range(depth):
            weight = min(self.weights[level] + count, max(AUTO.gain_memory, count))
            self.weights[level] = weight
            self.gains[level] += sum(credit.gains[level] - self.gains[level] for credit in credits) / weight
            self.rows[level] += sum(credit.rows[level] - self.rows[level] for credit in credits) / weight
            reached = sum(level < credit.depth for credit in credits)
            self.reached[level] += (reached - count * self.reached[level]) / weight
        self._fade(now, start=depth)

    def _fade(self, now: int, *, start: int = 0) -> None:
        keep, self.last_round = AUTO.untried_keep ** max(0, now - self.last_round), max(now, self.last_round)
        for level in range(start, len(self.weights)):
            # the first level keeps some weight, or a useless drafter would be taken for an unknown one
            least = 0.0 if level else min(self.weights[0], AUTO.min_first_weight)
            self.weights[level] = max(keep * self.weights[level], least)

    def expected(self, now: int) -> list[float]:
        """The gain of every level; with little weight, extrapolated from the levels above."""
        self._fade(now)
        found: list[float] = []
        above, ratio = 1.0, AUTO.first_gain
        for gain, weight in zip(self.gains, self.weights, strict=True):
            found.append((weight * gain + above * ratio) / (weight + 1.0))
            ratio = min(0.95, found[-1] / above) if above > 0 else 0.0
            above = found[-1]
        return found

    def known(self) -> list[float]:
        """Return the gain of every level by the known rates and their ratio; empty without them."""
        found: list[float] = []
        for rate in (*self.rates, *self.rates[-1:] * (len(self.gains) - len(self.rates))):
            found.append(rate * (found[-1] if found else self.known_ratio))
        return found

    def mixed_with(self, shared: Sequence[float], now: int, *, ratio: float = 1.0) -> list[float]:
        """One sequence's gains times a ratio, held closer to those of all sequences the fewer drafts it has had."""
        self._fade(now)
        return [
            (ratio * weight * own + AUTO.shared_weight * gain) / (weight + AUTO.shared_weight)
            for own, weight, gain in zip(self.gains, self.weights, shared, strict=True)
        ]


@dataclass(slots=True)
class SequenceLevels:
    """One sequence's estimates of one drafter.

    Attributes:
        levels: gains of the drafter's levels.
        recent: recent drafts, if the drafter is cheap.
        num_read: number of the sequence's tokens that the drafter has read.
        is_sampled: whether the text is sampled with a temperature.
    """

    levels: Levels
    recent: RecentDrafts = field(default_factory=RecentDrafts)
    num_read: int = 0
    is_sampled: bool = False
