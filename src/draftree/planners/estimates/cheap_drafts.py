"""The sequences for which a cheap drafter drafts.

Trees of a cheap drafter are judged after they are drafted, so only the drafts themselves are decided here: a sequence
gets one if its own recent drafts paid, or as a trial. In a batch a draft costs the same for every sequence, but a token
saves only its share of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.planners.estimates.constants import AUTO, TrialRates
from draftree.planners.estimates.credit import Credit
from draftree.planners.estimates.trials import TrialSchedule


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds that a decision compares.

    Attributes:
        draft: of the draft of one sequence.
        token: of a plain pass, per token that it writes.
        planning: of the planner, in a round with any draft.
        rates: shares of the time that trials may cost; no seconds.
        margin: gain relative to the cost of a draft from which it pays; no seconds.
    """

    draft: float
    token: float
    planning: float
    rates: TrialRates = AUTO.cheap_trials
    margin: float = 1.0

    def surplus(self, gain: float) -> float:
        """Return the seconds that a draft with this gain in tokens saves beyond its cost and the margin."""
        return gain * self.token - self.margin * self.draft


def _schedule_of_new_text() -> TrialSchedule:
    schedule = TrialSchedule()
    schedule.open_text()
    return schedule


@dataclass(slots=True)
class RecentDrafts:
    """One sequence's recent drafts from one cheap drafter. Mutated every round.

    Attributes:
        gain: tokens that a draft adds, less the cost of its rows in tokens of plain passes; None before the first
            decision.
        trials: schedule of trials while drafts do not pay; what other texts lacked, this one may repeat.
        is_trial: whether the draft of this round is a trial.
    """

    gain: float | None = None
    trials: TrialSchedule = field(default_factory=_schedule_of_new_text)
    is_trial: bool = False

    def rounds_until_trial(self, prices: Prices, now: int, *, planning: float) -> int:
        """Return the rounds until the next trial, which takes so many seconds of the planner's time."""
        return self.trials.rounds_left((prices.draft + planning) / prices.token, now, rates=prices.rates)

    def observe(self, now: int, net_gain: float, prices: Prices, *, planning: float) -> None:
        """Learn from a draft.

        Args:
            now: number of the round.
            net_gain: as `gain`.
            prices: seconds of the round.
            planning: this sequence's share of the planner's seconds.
        """
        if self.gain is not None:
            self.gain += (net_gain - self.gain) / AUTO.recent_memory
        if self.is_trial:
            self.trials.record(now, paid=prices.surplus(net_gain) > planning)


def choose_sequences(owns: Sequence[RecentDrafts], prices: Prices, now: int, *, shared_gain: float) -> list[bool]:
    """Return for which sequences to draft, and set `RecentDrafts.is_trial`.

    The planner's time is common: sequences whose drafts pay must regain it together, and trials share it.

    Args:
        owns: recent drafts of every sequence.
        prices: seconds of the round.
        now: number of the round.
        shared_gain: average over all texts, which a new text begins with if it is alone. In a batch that is the average
            of the sequences with drafts, so a new one has only trials until a draft paid.
    """
    for own in owns:
        if own.gain is None:
            own.gain = shared_gain if len(owns) == 1 else 0.0
    surplus = [prices.surplus(own.gain or 0.0) for own in owns]
    is_on = sum(value for value in surplus if value > 0) > prices.planning
    drafts = [is_on and value > 0 for value in surplus]
    waiting = [own for own, does_draft in zip(owns, drafts, strict=True) if not does_draft]
    due = [own for own in waiting if not own.rounds_until_trial(prices, now, planning=0.0)]
    shared = 0.0 if is_on else prices.planning / max(1, len(due))
    for own, does_draft in zip(owns, drafts, strict=True):
        own.is_trial = not does_draft and not own.rounds_until_trial(prices, now, planning=shared)
        if does_draft:
            own.trials.restart()
    return [does_draft or own.is_trial for own, does_draft in zip(owns, drafts, strict=True)]


def rounds_until_any_trial(owns: Sequence[RecentDrafts], prices: Prices, now: int) -> int:
    """Return the least number of rounds until a trial of any sequence."""
    shared = prices.planning / len(owns)
    return min(own.rounds_until_trial(prices, now, planning=shared) for own in owns)


def net_gains(credits: Sequence[Credit], curve: Sequence[float], batch: int, *, token_seconds: float) -> list[float]:
    """Return the tokens that each sequence's draft adds, less its share of the cost of all rows.

    Args:
        credits: of the drafts.
        curve: seconds of a pass by rows.
        batch: sequences of the round.
        token_seconds: of a plain pass, per token that it writes.
    """
    rows = [sum(credit.rows) for credit in credits]
    whole = round(sum(rows))
    seconds = curve[min(batch + whole, len(curve) - 1)] - curve[batch]
    each = seconds / whole / token_seconds if whole else 0.0
    return [sum(credit.gains) - each * count for credit, count in zip(credits, rows, strict=True)]
