"""What one drafter brings and takes, level by level, and whether it is asked in a round.

The gain of a level is the survival of its nodes that were worth scoring, so it is what the level adds to a round,
chance left out. Gains are averaged over all sequences, and each sequence's own count beside these for as much as it has
shown. What was not tried lately is believed less, and deeper levels are then judged by the ones above them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.core.types import DraftPart
from draftree.planners.costs import DraftCosts
from draftree.planners.credit import Credit

FIRST_GAIN = 0.5
"""What the first level brings before anything was seen."""
FADING = 0.98
"""What is left, a round later, of the weight of a level that was not tried."""
KNOWN = 3.0
"""Weight that the first level keeps: what is off because it was bad is not believed to be good for want of news."""
MEMORY = 16
SHARED_WEIGHT = 4.0
"""Rounds that all sequences' gains count beside a sequence's own."""
PATIENCE = 6
"""Drafts in a row of which nothing is worth scoring, before a drafter rests."""
PROBE_SHARE = 0.004
"""Share of all time that may be spent on trying again what did not pay."""
MAX_GAP = 512
PROBE_DEPTH = 2
LIKELY_LEVEL = 0.08
"""What a level costs before one was seen, as a share of a plain pass."""


@dataclass(slots=True)
class Levels:
    """Averages of each level's gain and rows. Mutated by `observe`."""

    gains: list[float]
    rows: list[float]
    weights: list[float]

    @classmethod
    def of_depth(cls, depth: int) -> Levels:
        """Nothing seen."""
        return cls([0.0] * depth, [1.0] * depth, [0.0] * depth)

    def observe(self, gains: Sequence[float], rows: Sequence[float], depth: int) -> None:
        """What a draft of so many levels brought; depth 0: none was asked for."""
        for level, weight in enumerate(self.weights):
            if level >= depth:
                self.weights[level] = max(FADING * weight, 0.0 if level else min(weight, KNOWN))
                continue
            weight = min(weight + 1.0, MEMORY)
            self.weights[level] = weight
            self.gains[level] += (gains[level] - self.gains[level]) / weight
            self.rows[level] += (rows[level] - self.rows[level]) / weight

    def expected(self) -> list[float]:
        """The gain of every level; where little was seen, as those above suggest."""
        found: list[float] = []
        above, ratio = 1.0, FIRST_GAIN
        for gain, weight in zip(self.gains, self.weights, strict=True):
            found.append((weight * gain + above * ratio) / (weight + 1.0))
            ratio = min(0.95, found[-1] / above) if above > 0 else 0.0
            above = found[-1]
        return found


@dataclass(slots=True)
class OwnLevels:
    """One sequence's view of one drafter: its gains, and how many tokens the drafter has not followed."""

    levels: Levels
    behind: float = math.inf


@dataclass(slots=True)
class Rest:
    """Growing intervals between tries of what does not pay. Mutated by both methods."""

    idle: int = 0
    gap: int = 1

    def goes_on(self, plain_seconds: float, try_seconds: float) -> bool:
        """Whether this round is rested as well; if not, the next rest is twice as long, up to what tries may cost."""
        self.idle += 1
        if self.idle < self.gap:
            return True
        longest = math.ceil(try_seconds / (PROBE_SHARE * plain_seconds))
        self.idle, self.gap = 0, max(1, min(2 * self.gap, longest, MAX_GAP))
        return False

    def end(self) -> None:
        """It pays."""
        self.idle, self.gap = 0, 1


@dataclass(slots=True)
class PartPlan:
    """One drafter in the planner's books. Mutated every round."""

    part: DraftPart
    levels: Levels
    costs: DraftCosts = field(default_factory=DraftCosts)
    depth: int = 0
    """Levels asked for in the last round; 0: not asked."""
    is_probe: bool = False
    rest: Rest = field(default_factory=Rest)
    fruitless: int = 0
    """Drafts in a row of which nothing was worth scoring."""

    @classmethod
    def of(cls, part: DraftPart) -> PartPlan:
        """Nothing seen."""
        return cls(part, Levels.of_depth(part.depth))

    def gains(self, owns: Sequence[OwnLevels]) -> list[list[float]]:
        """Every sequence's expected gains, level by level: its own held to those of all."""
        shared = self.levels.expected()
        return [
            [
                (weight * own_gain + SHARED_WEIGHT * gain) / (weight + SHARED_WEIGHT)
                for own_gain, weight, gain in zip(own.levels.gains, own.levels.weights, shared, strict=True)
            ]
            for own in owns
        ]

    def level_seconds(self, curve: Sequence[float], batch: int) -> list[float]:
        """What each level costs: drafting it, and its rows in the target's pass."""
        drafting = self.costs.of(1, otherwise=LIKELY_LEVEL * curve[batch])
        rows, seconds, found = float(batch), curve[batch], []
        for of_level in self.levels.rows:
            rows += batch * of_level
            now = curve[min(round(rows), len(curve) - 1)]
            found.append(drafting + now - seconds)
            seconds = now
        return found

    def decide(self, levels: int, curve: Sequence[float], batch: int) -> None:
        """Draft as many levels as pay; if none does, try it again now and then."""
        self.is_probe = False
        row = curve[min(batch + 1, len(curve) - 1)] - curve[batch]
        if levels:
            self.rest.end()
        elif not self.rest.goes_on(curve[batch], (self.costs.call or 0.0) + row):
            levels, self.is_probe = min(PROBE_DEPTH, self.part.depth), True
        self.depth = levels

    def decide_instant(self, curve: Sequence[float], batch: int) -> None:
        """Draft first and judge then; when nothing is worth scoring again and again, not every time."""
        tired = self.fruitless >= PATIENCE
        rests = tired and self.rest.goes_on(curve[batch], self.costs.call or 0.0)
        self.is_probe, self.depth = False, 0 if rests else self.part.depth

    def has_paid(self, credit: Credit, curve: Sequence[float], batch: int) -> bool:
        """Whether a sequence's draft was worth its seconds, and not only worth scoring once it was made."""
        rows = curve[min(batch + round(sum(credit.rows)), len(curve) - 1)] - curve[batch]
        return sum(credit.gains) * curve[batch] > (self.costs.call or 0.0) + rows

    def wake(self) -> None:
        """Something of it was worth scoring."""
        self.rest.end()
        self.fruitless = 0
