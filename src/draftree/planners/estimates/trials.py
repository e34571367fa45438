"""When something that does not pay is tried again: exponential back-off, bounded by a share of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftree.planners.estimates.constants import AUTO, TrialRates


@dataclass(slots=True)
class TrialSchedule:
    """Schedule of the trials of one drafter, or of rows that are not expected to pay. Mutated by its methods.

    A trial is due once its cost is at most a share of the time since the last one. Every fruitless trial divides the
    share, down to a least one. So waits grow geometrically up to a cap that is proportional to the cost of a trial.

    Attributes:
        fruitless: trials in a row that brought nothing.
        last_round: number of the round of the last trial; the first one is due at once.
    """

    fruitless: int = 0
    last_round: float = -math.inf

    def rounds_left(self, cost: float, now: int, *, rates: TrialRates = AUTO.trials) -> int:
        """Rounds until the next trial.

        Args:
            cost: of a trial, in plain passes.
            now: number of the round.
            rates: shares of the time that trials may cost.
        """
        share = max(rates.least_share, rates.first_share / rates.backoff ** max(0, min(self.fruitless, 16)))
        return math.ceil(max(0.0, self.last_round + cost / share - now))

    def record(self, now: int, *, paid: bool, hit: bool = False) -> None:
        """Record a trial.

        Args:
            now: number of the round.
            paid: whether it was worth its cost; the back-off starts anew.
            hit: whether its first guess was accepted, which may be chance: the next trial is due at once.
        """
        self.last_round = -math.inf if paid or hit else now
        self.fruitless = 0 if paid else self.fruitless + (not hit)

    def restart(self) -> None:
        """Start the back-off anew: it pays."""
        self.fruitless = 0

    def open_text(self) -> None:
        """Start the back-off anew for a new text. Its first trial is due at once, and does not lengthen the wait.

        A lookup often has nothing to continue at the end of a prompt, so the first draft of a text tells little.
        """
        self.fruitless, self.last_round = -1, -math.inf
