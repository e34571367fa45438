"""Plans: how many levels each drafter drafts, which nodes are scored, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.core.types import Budget, DraftCondition, DraftPart, SequenceRecord
from draftree.planners.estimates.constants import AUTO
from draftree.planners.estimates.costs import DraftCosts
from draftree.planners.estimates.gains import (
    Credit,
    Credits,
    Levels,
    Prices,
    SequenceAcceptance,
    SequenceLevels,
    TrialSchedule,
    choose_sequences,
    rounds_until_any_trial,
)

MEASURED_COUNTS = (8, 16, 32, 64, 128, 256, 512)
"""Numbers of nodes for which the cost of a row is averaged; over fewer, a measured curve is mostly noise."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Nodes of every tree, ascending, with the expected tokens and seconds of the round."""

    nodes: tuple[tuple[int, ...], ...]
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def choose_nodes(
    survivals: Sequence[Sequence[float]], seconds: Sequence[float], *, sunk: float = 0.0, others: int = 0
) -> Chosen:
    """Choose the nodes that are worth a row of the pass.

    Args:
        survivals: of every tree's nodes; no node's is above its parent's.
        seconds: time of a pass over 0, 1, 2, … rows, roots included.
        sunk: seconds that the round has taken so far.
        others: sequences of the pass without a tree here; each writes a token, and `seconds` include their rows.
    """
    batch = len(survivals)
    least = least_survival(seconds, batch)
    ranked = sorted(
        (-survival, tree, node)
        for tree, row in enumerate(survivals)
        for node, survival in enumerate(row)
        if survival >= least
    )
    del ranked[max(0, len(seconds) - 1 - batch) :]
    tokens = float(batch + others)
    plain = Chosen(((),) * batch, tokens, sunk + seconds[batch])
    best_speed, best, best_tokens = AUTO.node_margin * plain.speed, 0, tokens
    for count, (negative, _, _) in enumerate(ranked, 1):
        tokens -= negative
        speed = tokens / (sunk + seconds[batch + count])
        if speed > best_speed:
            best_speed, best, best_tokens = speed, count, tokens
    if not best:
        return plain
    nodes: list[list[int]] = [[] for _ in survivals]
    for _, tree, node in ranked[:best]:
        nodes[tree].append(node)
    return Chosen(tuple(tuple(sorted(row)) for row in nodes), best_tokens, sunk + seconds[batch + best])


def least_survival(seconds: Sequence[float], batch: int) -> float:
    """Return the survival below which a node is not considered: less where rows cost less than that share of a pass.

    A row of a pass that waits for its weights may cost a thousandth of it, and then even unlikely nodes pay.

    Args:
        seconds: time of a pass over 0, 1, 2, … rows.
    """
    last = len(seconds) - 1
    if batch > last or seconds[batch] <= 0.0:
        return AUTO.min_survival
    shares = [
        (seconds[batch + count] / seconds[batch] - 1.0) / count for count in MEASURED_COUNTS if batch + count <= last
    ]
    return max(AUTO.least_survival, min([AUTO.min_survival, *shares]))


@dataclass(frozen=True, slots=True)
class Depth:
    """A number of levels to draft, with the expected tokens and seconds of the round."""

    levels: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def choose_depth(
    gains: Sequence[float], level_seconds: Sequence[float], *, tokens: float, seconds: float, bias: float = 1.0
) -> Depth:
    """Choose how many levels to draft.

    Args:
        gains: tokens that each level is expected to add to the batch.
        level_seconds: cost of each level, including its rows in the target's pass.
        bias: minimum speed relative to no draft; higher for a disabled drafter, as hysteresis.
    """
    best = plain = Depth(0, tokens, seconds)
    least = bias * plain.speed
    for level, (gain, cost) in enumerate(zip(gains, level_seconds, strict=True), 1):
        tokens, seconds = tokens + gain, seconds + cost
        if tokens / seconds > max(least, best.speed):
            best = Depth(level, tokens, seconds)
    return best


@dataclass(slots=True)
class PartPlan:
    """One drafter's estimates and its plan for the current round. Mutated every round.

    Attributes:
        part: the drafter.
        levels: gains of its levels, averaged over all greedy sequences.
        sampled: the same for sequences that are sampled with a temperature.
        costs: of its drafts.
        trials: schedule of trials while it is off; a cheap drafter has one for each sequence.
        depth: levels of the current round; 0 if it does not draft.
        is_trial: whether it drafts though it is not expected to pay.
        sequence_seconds: of the draft of one sequence; None before the first one.
        num_drafts: number of rounds with a draft.
        recent_gain: of a draft, as `RecentDrafts.gain`, over all sequences.
        min_survival: survival below which the drafts of this round do not go deeper.
        is_sampled: whether the first sequence of the last round is sampled, for the reason of the plan.
    """

    part: DraftPart
    levels: Levels
    sampled: Levels
    costs: DraftCosts = field(default_factory=DraftCosts)
    trials: TrialSchedule = field(default_factory=TrialSchedule)
    depth: int = 0
    is_trial: bool = False
    sequence_seconds: float | None = None
    num_drafts: int = 0
    recent_gain: float = AUTO.first_gain
    min_survival: float = 0.0
    is_sampled: bool = False

    @classmethod
    def of(cls, part: DraftPart) -> PartPlan:
        """A plan without an observation."""
        return cls(
            part, Levels.of_depth(part.depth, part.greedy_rates), Levels.of_depth(part.depth, part.sampled_rates)
        )

    def levels_of(self, own: SequenceLevels) -> Levels:
        """The estimates over all sequences like this one."""
        return self.sampled if own.is_sampled else self.levels

    def open(self, *, is_sampled: bool = False) -> SequenceLevels:
        """Estimates for a new sequence."""
        return SequenceLevels(Levels.of_depth(self.part.depth), is_sampled=is_sampled)

    def is_cheap(self, plain_seconds: float, batch: int) -> bool:
        """Whether it drafts before the decision: its new tree predicts more than its earlier trees.

        Args:
            batch: sequences of the round. A lookup drafts for one sequence after the other.
        """
        if self.part.runs_model or self.sequence_seconds is None:
            return self.costs.is_below(AUTO.cheap_model_share, plain_seconds)
        return batch * self.sequence_seconds < AUTO.cheap_lookup_share * plain_seconds

    def gains(self, owns: Sequence[SequenceLevels], now: int) -> list[list[float]]:
        """Expected gains by sequence and level."""
        shared = {kind: levels.expected(now) for kind, levels in self._kinds(owns)}
        found = []
        for own in owns:
            levels = self.levels_of(own)
            corrected = [levels.hit_ratio * gain for gain in shared[own.is_sampled]]
            # a text unlike the last ones is judged by what was measured before
            found.append(own.levels.mixed_with(levels.known() or corrected, now, ratio=levels.hit_ratio))
        return found

    def _kinds(self, owns: Sequence[SequenceLevels]) -> list[tuple[bool, Levels]]:
        kinds = dict.fromkeys(own.is_sampled for own in owns)
        return [(kind, self.sampled if kind else self.levels) for kind in kinds or (self.is_sampled,)]

    def level_seconds(self, curve: Sequence[float], batch: int, owns: Sequence[SequenceLevels] = ()) -> list[float]:
        """Cost of each level: drafting it, if drafts get so deep, and its rows in the target's pass."""
        unknown = AUTO.unknown_level_share * curve[batch]
        kinds = [levels for _, levels in self._kinds(owns)]
        rows, seconds, drafting, found = float(batch), curve[batch], 0.0, []
        for level in range(self.part.depth):
            rows += batch * sum(levels.rows[level] for levels in kinds) / len(kinds)
            reached = sum(levels.reached[level] for levels in kinds) / len(kinds) if level else 1.0
            now, draft = _at(curve, rows), self.costs.of(level + 1, otherwise=unknown)
            found.append(min(1.0, batch * reached) * max(0.0, draft - drafting) + now - seconds)
            seconds, drafting = now, draft
        return found

    def choose(
        self,
        gains: Sequence[float],
        curve: Sequence[float],
        plain: Depth,
        *,
        owns: Sequence[SequenceLevels],
        catching_up: float,
        planning: float,
        now: int,
    ) -> Depth:
        """Plan as many levels as pay, or a trial if one is due.

        Args:
            curve: seconds of a pass by rows.
            catching_up: seconds until the drafter has read the texts.
            planning: seconds of the planner in a round with a draft.

        Returns:
            The levels that pay, with the round's expected tokens and seconds.
        """
        batch, self.is_sampled = len(owns), owns[0].is_sampled
        has_rates = bool(self.levels_of(owns[0]).rates)
        levels = self.level_seconds(curve, batch, owns)
        levels[0] += catching_up / AUTO.catch_up_rounds
        bias = AUTO.stay_on if self.depth else AUTO.turn_on
        best = choose_depth(gains, levels, tokens=plain.tokens, seconds=plain.seconds, bias=bias)
        self.min_survival = self._least_survival(curve, best.speed, batch) if self.part.is_calibrated else 0.0
        if has_rates and len(self.costs.calls) < AUTO.first_drafts:
            self._set(1)  # its cost is not settled, and its acceptance is known
        elif best.levels and self.costs.call is None:
            self._set(1)  # its cost is unknown
        elif best.levels:
            self.trials.restart()
            # a second level is tried once, or its cost would be taken for that of the first
            depth = best.levels if self.costs.knows_levels else max(best.levels, min(2, self.part.depth))
            self._set(self.part.depth if self.min_survival else depth)
        else:
            is_unsettled = self._is_unsettled(curve[batch])
            is_due = is_unsettled or not self._rounds_left(curve, batch, extra=catching_up + planning, now=now)
            self._set(self._trial_depth(curve[batch]) if is_due else 0, is_trial=is_due and not is_unsettled)
        return best

    def _is_unsettled(self, plain_seconds: float) -> bool:
        """Whether it has too few drafts to turn it off: a text may begin with misses, and the first drafts are slow."""
        is_cheap = self.num_drafts * min(self.costs.calls, default=0.0) < AUTO.settling_share * plain_seconds
        return self.num_drafts < AUTO.least_drafts and (is_cheap or self.costs.count < AUTO.first_drafts)

    def _least_survival(self, curve: Sequence[float], speed: float, batch: int) -> float:
        """Survival of a node below which a further level is expected to cost more than it gains at this speed."""
        own, otherwise = self.sampled if self.is_sampled else self.levels, AUTO.unknown_level_share * curve[batch]
        level = self.costs.of(2, otherwise=otherwise) - self.costs.of(1, otherwise=otherwise)
        rate = own.rates[1] if len(own.rates) > 1 else AUTO.further_rate
        cost = level / batch + _at(curve, batch + 1) - curve[batch]
        return min(AUTO.most_survival, speed * cost / max(0.05, AUTO.unsure_share * rate * min(1.0, own.hit_ratio)))

    def shares(self, gains: Sequence[Sequence[float]], speed: float) -> list[int]:
        """The depth for each sequence: half of a draft's cost is common, and each must regain its part of the rest."""
        batch = len(gains)
        least = speed * self.costs.of(self.depth) / (2 * batch) if batch > 1 and not self.is_trial else 0.0
        return [self.depth if sum(own[: self.depth]) >= least else 0 for own in gains]

    def prices(self, plain_seconds: float, num_tokens: int, *, planning: float) -> Prices:
        """Return the seconds by which drafts of a cheap drafter are judged.

        Args:
            num_tokens: tokens that it writes, those of sequences without this planner included.
            planning: seconds of the planner in a round with a draft.
        """
        seconds, token = self.sequence_seconds or 0.0, plain_seconds / num_tokens
        if num_tokens == 1:
            return Prices(seconds, token, planning)
        return Prices(seconds, token, (1.0 + AUTO.learning) * planning, AUTO.batch_trials, AUTO.batch_margin)

    def choose_cheap(self, owns: Sequence[SequenceLevels], prices: Prices, *, now: int) -> list[int]:
        """Return the levels for each sequence: all if its recent drafts paid or if a trial is due, else none."""
        recent = [own.recent for own in owns]
        chosen = choose_sequences(recent, prices, now, shared_gain=self.recent_gain)
        is_trial = all(own.is_trial for own, is_chosen in zip(recent, chosen, strict=True) if is_chosen)
        self._set(self.part.depth if any(chosen) else 0, is_trial=is_trial)
        return [self.part.depth if is_chosen else 0 for is_chosen in chosen]

    def _set(self, depth: int, *, is_trial: bool = False) -> None:
        self.depth, self.is_trial = depth, is_trial

    def _trial_depth(self, plain_seconds: float) -> int:
        is_single = self.costs.of(1) > AUTO.single_level_share * plain_seconds
        return min(1 if is_single else AUTO.trial_depth, self.part.depth)

    def rounds_until_trial(
        self, owns: Sequence[SequenceLevels], curve: Sequence[float], prices: Prices, *, is_cheap: bool, now: int
    ) -> int:
        """Rounds until the next trial; of any sequence, if the drafter is cheap."""
        if is_cheap:
            return rounds_until_any_trial([own.recent for own in owns], prices, now)
        return self._rounds_left(curve, len(owns), extra=prices.planning, now=now)

    def _rounds_left(self, curve: Sequence[float], batch: int, *, extra: float, now: int) -> int:
        row = curve[min(batch + 1, len(curve) - 1)] - curve[batch]
        seconds = self.costs.of(self._trial_depth(curve[batch]), otherwise=self.costs.call or 0.0) + row
        return self.trials.rounds_left((extra + seconds) / curve[batch], now)

    def observe(
        self, now: int, owns: Sequence[SequenceLevels], credits: Sequence[Credit], hits: Sequence[bool]
    ) -> None:
        """Learn from the drafts of a round."""
        for is_sampled, levels in self._kinds(owns):
            own = [credit for credit, state in zip(credits, owns, strict=True) if state.is_sampled == is_sampled]
            found = [hit for hit, state in zip(hits, owns, strict=True) if state.is_sampled == is_sampled]
            levels.observe_hits(sum(found), sum(credit.first for credit in own), drafts=len(own))
            levels.observe(now, own, self.depth)

    def observe_costs(self, seconds: float, depth: int, *, unread: Sequence[int]) -> None:
        """Learn from the seconds of a draft.

        Args:
            depth: number of drafted levels; 0 for an empty draft.
            unread: number of tokens of each sequence that it had to read first.
        """
        if self.part.runs_model and not depth:
            return  # it was skipped or not ready
        self.costs.observe(seconds, depth, unread=sum(unread))
        each, self.num_drafts = seconds / len(unread), self.num_drafts + 1
        known = self.sequence_seconds or each
        # the first draft is slower than later ones, so it loses weight fast
        weight = 1.0 / min(self.num_drafts, AUTO.cost_memory)
        self.sequence_seconds = known + weight * (min(each, AUTO.max_draft_jump * known) - known)

    def observe_net_gains(
        self,
        owns: Sequence[SequenceLevels],
        gains: Sequence[float],
        prices: Prices,
        *,
        is_hit: bool,
        is_cheap: bool,
        now: int,
    ) -> None:
        """Average what drafts brought less the cost of their rows, and record trials.

        Args:
            prices: seconds of the round.
            is_cheap: whether drafts were decided for each sequence by its own.
        """
        self.recent_gain += (sum(gains) / len(gains) - self.recent_gain) / AUTO.recent_memory
        for own, gain in zip(owns, gains, strict=True):
            own.recent.is_trial = own.recent.is_trial and is_cheap
            own.recent.observe(now, gain, prices, planning=prices.planning / len(gains))
        if self.is_trial and not is_cheap:
            gained = prices.token * sum(gain for gain in gains if gain > 0)
            paid = gained > (self.costs.call or 0.0) + prices.planning
            self.trials.record(now, paid=paid, hit=is_hit)


def _at(curve: Sequence[float], rows: float) -> float:
    """Return the seconds of a pass over a mean number of rows."""
    low = min(int(rows), len(curve) - 1)
    return curve[low] + (rows - low) * (curve[min(low + 1, len(curve) - 1)] - curve[low])


@dataclass(slots=True)
class SequenceEstimates:
    """Estimates for one sequence. Mutated every round.

    Attributes:
        acceptance: deviation of its nodes' acceptance from that of all sequences.
        parts: its gains from each drafter.
        length: tokens of the text as of the last round; 0 before the first one.
        drafted: levels that each drafter drafted in the last round.
    """

    acceptance: SequenceAcceptance
    parts: tuple[SequenceLevels, ...]
    length: int = 0
    drafted: tuple[int, ...] = ()


def budget_of(
    plans: Sequence[PartPlan], asked: Sequence[int], conditions: Sequence[DraftCondition | None], *, limit: int
) -> Budget:
    """Return the budget of a sequence."""
    asked = tuple(min(levels, limit) for levels in asked)
    depth = max(asked)
    survivals = [plan.min_survival for plan, levels in zip(plans, asked, strict=True) if levels]
    return Budget(
        limit if depth else 0,
        depth,
        part_depths=asked if len(asked) > 1 else (),
        min_survival=min((survival for survival in survivals if survival), default=0.0),
        conditions=tuple(conditions) if any(conditions) else (),
    )


def conditions_of(
    index: int,
    plans: Sequence[PartPlan],
    asked: Sequence[Sequence[int]],
    gains: Sequence[Sequence[float]],
    least: float,
    states: Sequence[SequenceEstimates],
) -> list[DraftCondition | None]:
    """Return what a drafter's draft must add to the drafts of lookups, which come first, for every sequence."""
    found: list[DraftCondition | None] = [None] * len(states)
    if not plans[index].part.runs_model:
        return found
    for place, (own, state) in enumerate(zip(gains, states, strict=True)):
        lookups = [
            part
            for part, plan in enumerate(plans)
            if asked[part][place] and not plan.part.runs_model and plan.part.gives_confidence
        ]
        if lookups:
            trust = min(plans[part].levels_of(state.parts[part]).hit_ratio for part in lookups)
            found[place] = DraftCondition(tuple(own), least, min(1.0, trust))
    return found


def note_drafted(
    plans: Sequence[PartPlan],
    credits: Credits,
    asked: Sequence[list[int]],
    conditions: Sequence[Sequence[DraftCondition | None]],
    states: Sequence[SequenceEstimates],
    rows: Sequence[SequenceRecord],
    firsts: Sequence[bool],
) -> None:
    """Note what was drafted, and set the levels of drafters to 0 that were skipped or not ready.

    A drafter that runs a model is skipped if its condition is not met. In the first round of a text it may not have
    read the text yet.

    Args:
        firsts: whether the round is the first one of each text.
    """
    for place, (state, row, is_first) in enumerate(zip(states, rows, firsts, strict=True)):
        state.drafted = tuple([credits.depth_of(part, row.drafted) for part in range(len(plans))])
        for part, plan in enumerate(plans):
            may_be_empty = is_first or conditions[part][place] is not None
            if may_be_empty and plan.part.runs_model and not state.drafted[part]:
                asked[part][place] = 0


WORTH_SAYING = 0.001
"""Minimum cost of an unread token, in passes, for mention."""


def sentence(plans: Sequence[PartPlan], curve: Sequence[float], batch: int, *, now: int) -> str:
    """Return the cost and the gain of each drafter, and the decision.

    Args:
        curve: seconds of a pass by rows.
    """
    return "; ".join(_of(plan, curve, batch, is_alone=len(plans) == 1, now=now) for plan in plans)


def _of(plan: PartPlan, curve: Sequence[float], batch: int, *, is_alone: bool, now: int) -> str:
    name = "" if is_alone or not plan.part.name else f"{plan.part.name}: "
    if plan.costs.call is None:
        return f"{name}nothing has been drafted yet"
    plain = curve[batch]
    row = (curve[min(batch + 1, len(curve) - 1)] - plain) / plain
    gains = (plan.sampled if plan.is_sampled else plan.levels).expected(now)
    if plan.is_cheap(plain, batch):
        cost = plan.costs.call if plan.part.runs_model else plan.sequence_seconds or 0.0
        state = "off, tried at growing intervals" if plan.depth == 0 or plan.is_trial else "on"
        return (
            f"{name}a draft costs {cost / plain:.3f} of a target pass, so its tree is judged afterwards; "
            f"a further node costs {row:.3f}, and scored nodes add {sum(gains):.2f} tokens a round: {state}"
        )
    level = plan.costs.of(1, otherwise=plan.costs.call) / plain
    break_even = (plan.level_seconds(curve, batch)[0]) / plain
    state = "off" if plan.depth == 0 or plan.is_trial else f"{plan.depth} level{'s' if plan.depth > 1 else ''}"
    unread = plan.costs.unread_token / plain
    reading = f", an unread token {unread:.3f}" if unread >= WORTH_SAYING else ""
    return (
        f"{name}a draft level costs {level:.2f} of a target pass{reading}; break-even acceptance {break_even:.2f}; "
        f"measured {gains[0]:.2f}: {state}"
    )
