"""What one drafter's levels add and cost, and how many of them are drafted in a round.

The gain of a level is the summed survival of its scored nodes, so it is the expected number of tokens that the level
adds to a round. Gains are averaged over all sequences; each sequence's own average counts by its number of drafts.
Levels that were not drafted lately lose weight, and deeper ones are then estimated from the ones above them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.core.types import DraftPart
from draftree.planners.estimates.choosing import Depth, choose_depth
from draftree.planners.estimates.constants import AUTO
from draftree.planners.estimates.costs import DraftCosts
from draftree.planners.estimates.credit import Credit
from draftree.planners.estimates.trials import TrialSchedule


@dataclass(slots=True)
class Levels:
    """Averages of each level's gain and rows. Mutated by its methods.

    Attributes:
        gains: tokens a round, by level.
        rows: scored nodes a round, by level.
        weights: drafts that each average counts as.
        last_round: number of the round to which the weights are faded.
    """

    gains: list[float]
    rows: list[float]
    weights: list[float]
    last_round: int = 0

    @classmethod
    def of_depth(cls, depth: int) -> Levels:
        """Averages without an observation."""
        return cls([0.0] * depth, [1.0] * depth, [0.0] * depth)

    def observe(self, now: int, credits: Sequence[Credit], depth: int) -> None:
        """Average what drafts of `depth` levels brought in round `now`."""
        self._fade(now - 1)
        count = len(credits)
        for level in range(depth):
            weight = min(self.weights[level] + count, max(AUTO.gain_memory, count))
            self.weights[level] = weight
            self.gains[level] += sum(credit.gains[level] - self.gains[level] for credit in credits) / weight
            self.rows[level] += sum(credit.rows[level] - self.rows[level] for credit in credits) / weight
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

    def mixed_with(self, shared: Sequence[float], now: int) -> list[float]:
        """One sequence's gains, held closer to those of all sequences the fewer drafts it has had."""
        self._fade(now)
        return [
            (weight * own + AUTO.shared_weight * gain) / (weight + AUTO.shared_weight)
            for own, weight, gain in zip(self.gains, self.weights, shared, strict=True)
        ]


@dataclass(slots=True)
class SequenceLevels:
    """One sequence's gains from one drafter, and the number of its tokens that the drafter has read."""

    levels: Levels
    num_read: int = 0


@dataclass(slots=True)
class PartPlan:
    """One drafter's estimates and its plan for the current round. Mutated every round.

    Attributes:
        part: the drafter.
        levels: gains of its levels, averaged over all sequences.
        costs: of its drafts.
        trials: schedule of trials while it is off.
        depth: levels of the current round; 0 if it does not draft.
        is_trial: whether it drafts though it is not expected to pay.
        recent_gain: of a draft, less the cost of its rows, in plain passes.
        hits: drafts whose first token was accepted.
        expected_hits: how many were expected; gains are corrected by the ratio.
    """

    part: DraftPart
    levels: Levels
    costs: DraftCosts = field(default_factory=DraftCosts)
    trials: TrialSchedule = field(default_factory=TrialSchedule)
    depth: int = 0
    is_trial: bool = False
    recent_gain: float = AUTO.first_gain
    hits: float = AUTO.hit_prior
    expected_hits: float = AUTO.hit_prior

    @classmethod
    def of(cls, part: DraftPart) -> PartPlan:
        """A plan without an observation."""
        return cls(part, Levels.of_depth(part.depth))

    @property
    def hit_ratio(self) -> float:
        """Accepted first tokens over expected ones: averages of expected gains follow a bad drafter late."""
        return self.hits / self.expected_hits

    def is_cheap(self, plain_seconds: float) -> bool:
        """Whether it drafts first and its tree is judged then, which tells more than its earlier trees do."""
        share = AUTO.cheap_model_share if self.part.runs_model else AUTO.cheap_lookup_share
        return self.costs.is_below(share, plain_seconds)

    def gains(self, owns: Sequence[SequenceLevels], now: int) -> list[list[float]]:
        """Expected gains by sequence and level."""
        shared = self.levels.expected(now)
        return [[self.hit_ratio * gain for gain in own.levels.mixed_with(shared, now)] for own in owns]

    def level_seconds(self, curve: Sequence[float], batch: int) -> list[float]:
        """Cost of each level: drafting it, and its rows in the target's pass."""
        drafting = self.costs.of(1, otherwise=AUTO.unknown_level_share * curve[batch])
        rows, seconds, found = float(batch), curve[batch], []
        for of_level in self.levels.rows:
            rows += batch * of_level
            now = curve[min(round(rows), len(curve) - 1)]
            found.append(drafting + now - seconds)
            seconds = now
        return found

    def choose(
        self,
        gains: Sequence[float],
        curve: Sequence[float],
        plain: Depth,
        *,
        batch: int,
        catching_up: float,
        planning: float,
        now: int,
    ) -> Depth:
        """Plan as many levels as pay, or a trial if one is due.

        Args:
            gains: expected tokens of the whole batch by level.
            curve: seconds of a pass by rows.
            plain: the round without this drafter.
            batch: sequences of the round.
            catching_up: seconds until the drafter has read the texts.
            planning: seconds of the planner in a round with a draft.
            now: number of the round.

        Returns:
            The levels that pay, with the round's expected tokens and seconds.
        """
        levels = self.level_seconds(curve, batch)
        levels[0] += catching_up / AUTO.catch_up_rounds
        bias = AUTO.stay_on if self.depth else AUTO.turn_on
        best = choose_depth(gains, levels, tokens=plain.tokens, seconds=plain.seconds, bias=bias)
        if best.levels and self.costs.call is None:
            self._set(1)  # its cost is unknown
        elif best.levels:
            self.trials.restart()
            self._set(best.levels)
        else:
            is_due = not self.rounds_until_trial(curve, batch, extra=catching_up + planning, now=now)
            self._set(self._trial_depth(curve[batch]) if is_due else 0, is_trial=is_due)
        return best

    def choose_cheap(self, curve: Sequence[float], *, batch: int, planning: float, now: int) -> None:
        """Plan a draft in full if recent drafts paid on average, or if a trial is due.

        Args:
            curve: seconds of a pass by rows.
            batch: sequences of the round.
            planning: seconds of the planner in a round with a draft.
            now: number of the round.
        """
        is_on = self.pays(self.recent_gain, curve[batch], planning=planning)
        is_due = not is_on and not self.rounds_until_trial(curve, batch, extra=planning, now=now)
        self._set(self.part.depth if is_on or is_due else 0, is_trial=is_due)
        if is_on:
            self.trials.restart()

    def _set(self, depth: int, *, is_trial: bool = False) -> None:
        self.depth, self.is_trial = depth, is_trial

    def _trial_depth(self, plain_seconds: float) -> int:
        is_single = self.costs.of(1) > AUTO.single_level_share * plain_seconds
        return min(1 if is_single else AUTO.trial_depth, self.part.depth)

    def rounds_until_trial(self, curve: Sequence[float], batch: int, *, extra: float, now: int) -> int:
        """Rounds until the next trial, with so many `extra` seconds; a trial of a cheap drafter has no row."""
        seconds, rates = self.costs.call or 0.0, AUTO.cheap_trials
        if not self.is_cheap(curve[1]):
            row = curve[min(batch + 1, len(curve) - 1)] - curve[batch]
            seconds, rates = self.costs.of(self._trial_depth(curve[batch]), otherwise=seconds) + row, AUTO.trials
        return self.trials.rounds_left((extra + seconds) / curve[batch], now, rates=rates)

    def observe(self, now: int, credits: Sequence[Credit], hits: int) -> None:
        """Learn from the drafts of a round.

        Args:
            now: number of the round.
            credits: of the drafts.
            hits: number of drafts whose first token was accepted.
        """
        self.expected_hits += sum(credit.gains[0] for credit in credits)
        self.hits += hits
        if self.expected_hits > AUTO.hit_memory:
            self.hits *= AUTO.hit_memory / self.expected_hits
            self.expected_hits = AUTO.hit_memory
        self.levels.observe(now, credits, self.depth)

    def observe_net_gains(self, gains: Sequence[float]) -> None:
        """Average the drafts' gains less the cost of their rows, in plain passes."""
        self.recent_gain += (sum(gains) / len(gains) - self.recent_gain) / AUTO.recent_memory

    def pays(self, net_gain: float, plain_seconds: float, *, planning: float) -> bool:
        """Whether a draft of this gain is worth its seconds and those of planning."""
        return net_gain * plain_seconds > (self.costs.call or 0.0) + planning


def net_gain(credit: Credit, curve: Sequence[float], batch: int) -> float:
    """Gain of a draft less the cost of its rows, in plain passes."""
    rows = curve[min(batch + round(sum(credit.rows)), len(curve) - 1)] - curve[batch]
    return sum(credit.gains) - rows / curve[batch]
