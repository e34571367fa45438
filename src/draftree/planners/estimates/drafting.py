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
from draftree.planners.estimates.costs import DraftCosts
from draftree.planners.estimates.credit import Credit

FIRST_GAIN = 0.5
"""What the first level brings before anything was seen."""
FADING = 0.98
"""What is left, a round later, of the weight of a level that was not tried."""
KNOWN = 8.0
"""Weight that the first level keeps: what is off because it was bad is not believed to be good for want of news."""
MEMORY = 16
SHARED_WEIGHT = 4.0
"""Rounds that all sequences' gains count beside a sequence's own."""
PATIENCE = 6
"""Drafts in a row of which nothing is worth scoring, before a drafter rests."""
PROBE_SHARE = 0.004
"""Share of all time that may be spent on trying again what did not pay."""
FIRST_TRIES = 1.0
"""Plain passes that may be spent on it before any time has passed."""
MAX_GAP = 512
PROBE_DEPTH = 2
DEAR_LEVEL = 0.2
"""Share of a plain pass from which a level is tried alone."""
INSTANT, INSTANT_AT_ONCE = 0.02, 0.15
"""Shares of a plain pass up to which a draft is made first and judged then: by a drafter whose levels are passes, and
by one that answers at once. What that one would bring is better seen in its draft than told from earlier ones."""
LIKELY_LEVEL = 0.08
"""What a level costs before one was seen, as a share of a plain pass."""
SURE_OF, SURE = 1.0, 50.0
"""First guesses that are taken to have come as expected before any was seen, and those that are remembered."""
SOON = 32
"""Rounds within which what it takes to catch up with a text must come back."""


@dataclass(slots=True)
class Levels:
    """Averages of each level's gain and rows. Mutated by its methods."""

    gains: list[float]
    rows: list[float]
    weights: list[float]
    rounds_ago: int = 0
    """Rounds since weights were brought up to date."""

    @classmethod
    def of_depth(cls, depth: int) -> Levels:
        """Nothing seen."""
        return cls([0.0] * depth, [1.0] * depth, [0.0] * depth)

    def observe(self, gains: Sequence[float], rows: Sequence[float], depth: int, *, count: int = 1) -> None:
        """What `count` drafts of so many levels brought in the mean; depth 0: none was asked for."""
        if not depth:
            self.fade(1)
            return
        self._settle()
        for level in range(depth):
            weight = min(self.weights[level] + count, max(MEMORY, count))
            self.weights[level] = weight
            self.gains[level] += (gains[level] - self.gains[level]) * count / weight
            self.rows[level] += (rows[level] - self.rows[level]) * count / weight
        self._fade(1, depth)

    def fade(self, rounds: int) -> None:
        """So many rounds without news."""
        self.rounds_ago += rounds

    def _settle(self) -> None:
        if self.rounds_ago:
            self._fade(self.rounds_ago, 0)
            self.rounds_ago = 0

    def _fade(self, rounds: int, start: int) -> None:
        kept = FADING**rounds
        for level in range(start, len(self.weights)):
            weight = self.weights[level]
            self.weights[level] = max(kept * weight, 0.0 if level else min(weight, KNOWN))

    def expected(self) -> list[float]:
        """The gain of every level; where little was seen, as those above suggest."""
        self._settle()
        found: list[float] = []
        above, ratio = 1.0, FIRST_GAIN
        for gain, weight in zip(self.gains, self.weights, strict=True):
            found.append((weight * gain + above * ratio) / (weight + 1.0))
            ratio = min(0.95, found[-1] / above) if above > 0 else 0.0
            above = found[-1]
        return found

    def beside(self, shared: Sequence[float]) -> list[float]:
        """One sequence's gains, held to those of all the more the less it has shown."""
        self._settle()
        return [
            (weight * own + SHARED_WEIGHT * gain) / (weight + SHARED_WEIGHT)
            for own, weight, gain in zip(self.gains, self.weights, shared, strict=True)
        ]


@dataclass(slots=True)
class OwnLevels:
    """One sequence's view of one drafter: its gains, and how many tokens of the text the drafter has read."""

    levels: Levels
    read: int = 0


@dataclass(slots=True)
class Rest:
    """Growing intervals between tries of what does not pay, and what may be spent on these. Mutated by its methods.

    Attributes:
        idle: rounds since the last try.
        gap: rounds that a rest takes at least.
        saved: plain passes that tries may take.
    """

    idle: int = 0
    gap: int = 1
    saved: float = FIRST_TRIES

    def goes_on(self, plain_seconds: float, try_seconds: float, rounds: int = 1) -> bool:
        """Whether the rest goes on behind so many rounds; if not, the next is twice as long, up to what tries cost."""
        self.idle += rounds
        self.saved = min(self.saved + PROBE_SHARE * rounds, FIRST_TRIES + try_seconds / plain_seconds)
        if self.left(plain_seconds, try_seconds):
            return True
        self.saved = max(0.0, self.saved - try_seconds / plain_seconds)
        longest = math.ceil(try_seconds / (PROBE_SHARE * plain_seconds))
        self.idle, self.gap = 0, max(1, min(2 * self.gap, longest, MAX_GAP))
        return False

    def left(self, plain_seconds: float, try_seconds: float) -> int:
        """Rounds until the next try."""
        missing = try_seconds / plain_seconds - self.saved
        # a text that goes on unread becomes dearer to try than is saved meanwhile
        return max(0, self.gap - self.idle, min(MAX_GAP - self.idle, math.ceil(missing / PROBE_SHARE)))

    def again(self, plain_seconds: float, try_seconds: float) -> None:
        """Try once more: the last try was right, which may be luck."""
        self.idle, self.gap, self.saved = 0, 1, max(self.saved, try_seconds / plain_seconds)

    def end(self) -> None:
        """It pays."""
        self.idle, self.gap, self.saved = 0, 1, max(self.saved, FIRST_TRIES)


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
    hits: float = SURE_OF
    """Drafts whose first token was written; all gains are counted by these over those that were expected."""
    expected_hits: float = SURE_OF
    try_seconds: float = 0.0
    """What the next try is expected to take, while it rests."""
    repeat_seconds: float = 0.0
    """And one more right behind it."""

    @classmethod
    def of(cls, part: DraftPart) -> PartPlan:
        """Nothing seen."""
        return cls(part, Levels.of_depth(part.depth))

    @property
    def luck(self) -> float:
        """First guesses that were written, over those that were expected."""
        return self.hits / self.expected_hits

    def is_instant(self, plain_seconds: float) -> bool:
        """Whether a draft is made before it is judged."""
        return self.costs.is_below(INSTANT if self.part.runs_model else INSTANT_AT_ONCE, plain_seconds)

    def gains(self, owns: Sequence[OwnLevels]) -> list[list[float]]:
        """Every sequence's expected gains, level by level: its own held to those of all."""
        shared = self.levels.expected()
        return [[self.luck * gain for gain in own.levels.beside(shared)] for own in owns]

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

    def decide(
        self, levels: int, curve: Sequence[float], batch: int, *, catching_up: float = 0.0, rounds: int = 1
    ) -> None:
        """Draft as many levels as pay; if none does, try it again now and then.

        Args:
            levels: that pay.
            curve: seconds of a pass by rows.
            batch: sequences that are written at once.
            catching_up: seconds until the drafter has read the texts.
            rounds: since the last decision.
        """
        self.is_probe = False
        if levels and self.costs.call is None:
            levels = 1  # what it costs is not known yet
        elif levels:
            self.rest.end()
        else:
            tried = self._tried(curve[batch])
            row = curve[min(batch + 1, len(curve) - 1)] - curve[batch]
            self.try_seconds = catching_up + self.costs.of(tried, otherwise=self.costs.call or 0.0) + row
            self.repeat_seconds = self.try_seconds - catching_up
            if not self.rest.goes_on(curve[batch], self.try_seconds, rounds):
                levels, self.is_probe = tried, True
        self.depth = levels

    def _tried(self, plain_seconds: float) -> int:
        is_dear = self.costs.of(1) > DEAR_LEVEL * plain_seconds
        return min(1 if is_dear else PROBE_DEPTH, self.part.depth)

    def decide_instant(self, curve: Sequence[float], batch: int, *, rounds: int = 1) -> None:
        """Draft first and judge then; when nothing is worth scoring again and again, not every time."""
        self.try_seconds = self.costs.call or 0.0
        rests = self.fruitless >= PATIENCE and self.rest.goes_on(curve[batch], self.try_seconds, rounds)
        self.is_probe, self.depth = False, 0 if rests else self.part.depth

    def learn(self, credits: Sequence[Credit], hits: int) -> None:
        """What the drafts of a round brought; without any it is a round without news.

        Args:
            credits: of the drafts.
            hits: of how many the first token was written.
        """
        if not credits:
            self.levels.fade(1)
            return
        count = len(credits)
        # averages of what was expected follow late: at first, hits tell sooner
        self.expected_hits += sum(credit.gains[0] for credit in credits)
        self.hits += hits
        if self.expected_hits > SURE:
            self.hits *= SURE / self.expected_hits
            self.expected_hits = SURE
        gains = [sum(column) / count for column in zip(*(credit.gains for credit in credits), strict=True)]
        rows = [sum(column) / count for column in zip(*(credit.rows for credit in credits), strict=True)]
        self.levels.observe(gains, rows, self.depth, count=count)

    def has_paid(self, credit: Credit, curve: Sequence[float], batch: int) -> bool:
        """Whether a sequence's draft was worth its seconds, and not only worth scoring once it was made."""
        rows = curve[min(batch + round(sum(credit.rows)), len(curve) - 1)] - curve[batch]
        return sum(credit.gains) * curve[batch] > (self.costs.call or 0.0) + rows

    def wake(self) -> None:
        """Something of it was worth scoring."""
        self.rest.end()
        self.fruitless = 0
