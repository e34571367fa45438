"""Drafts where measured costs and calibrated acceptance promise more tokens per second.

Every decision compares expected tokens per second of the round with those of another one. Three parts make it up:

* *Cost.* A pass costs seconds by its rows, a draft by its levels, both measured in every round.
* *Gain.* A drafted node survives with a probability that is calibrated by the drafter's own confidence, and a level of
  a drafter that runs a model adds the product of the acceptance of the levels down to it. Both are learned from all
  drafted nodes whose fate the text shows, scored or not, and shifted by what was seen in the sequence itself.
* *Exploration.* What does not pay is tried again once the loss of its last trial is at most a stated share of the time
  since. So a useless drafter loses at most that share of the time, and the first drafts, until it is known as such.

A lookup drafts first, and its tree is pruned then: over the whole batch the nodes of highest survival are scored, as
many as maximize expected tokens over expected seconds. A drafter that runs a model drafts as many levels as pay; with
calibrated scores it stops where a further level would cost more than it gains, and beside a lookup it drafts only where
it adds enough.

Source: goodput from measured cost, as SmartSpec, arXiv 2406.14066; best-first sizes, as OPT-Tree, arXiv 2406.17276,
with calibrated probabilities in place of the drafter's own. Costs a few passes before the first round and some tens of
microseconds a round. Loses to the best fixed length where acceptance changes faster than it learns. Plans depend on the
clock; under a rule whose text depends on the draft the text does, too. There, and for a drafter that works ahead,
`fixed` is the default.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from operator import mul
from typing import Any, final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, ROOT, TokenTree, depths, follow
from draftree.core.types import Budget, DraftCondition, DraftPart, RoundRecord, SequenceRecord
from draftree.planners.base import Planner

NOTHING = Budget(0, 0)
MIN_UNREAD = 16  # unread tokens above which a draft's seconds do not count as the cost of its levels
MAX_ROWS = 4096  # up to which the cost of a pass is extrapolated


@dataclass(frozen=True, slots=True)
class AutoConstants:
    """Numbers that `adaptive` is tuned by; docs/lab/auto.md compares each with its neighbours."""

    trial_share: float = 0.01  # share of the time that trials of what does not pay may lose
    batch_margin: float = 2.0  # gain relative to the cost of a lookup's draft from which a sequence of a batch has one
    catch_up_rounds: int = 32  # rounds over which the cost of reading the unread text must be regained
    growth: float = 0.04  # share by which expected seconds rise at most after a longer measurement
    settled_rounds: int = 12
    """Rounds with a draft in a row after which the cost of rounds without one changes along, and the reverse."""
    lookup_memory: int = 6  # drafts over which the gain of a lookup is averaged
    prior_weight: float = 3.0  # weight in observations of what is assumed of an unknown drafter
    known_weight: float = 20.0  # the same for a drafter whose acceptance was measured before
    sequence_weight: float = 12.0  # weight in observations of all sequences' acceptance beside a sequence's own
    sequence_memory: float = 32.0  # observations over which a sequence's own acceptance is averaged


AUTO = AutoConstants()


# Cost


def change_of(expected: float, seconds: float) -> float:
    """Return by how much expected seconds change after a measurement: down to it, or up a little.

    A busy machine lengthens a measurement, and nothing shortens one.
    """
    return min(seconds - expected, AUTO.growth * expected)


@dataclass(slots=True)
class _Cell:
    """Factors of the measured curve for one batch size.

    A draft and the work on its tree slow the pass after it down, by up to a third where passes are short.
    """

    plain: float  # without a draft before the pass
    drafted: float  # with one
    slope: float  # of further rows
    num_alike: int = 0  # consecutive rounds with a draft, or negative without one
    magnitude: int = 0  # of the prefix length


class PassCosts:
    """Seconds of a round without its draft, by rows and batch. Mutated by `observe`."""

    def __init__(self) -> None:
        self.learn({})

    def learn(self, pass_seconds: Mapping[int, float]) -> None:
        """Set measured passes of one sequence; a pass costs at most what one with more rows costs."""
        known = sorted(pass_seconds) or [1]
        seconds = list(accumulate((pass_seconds.get(rows, 1.0) for rows in reversed(known)), min))[::-1]
        slope = seconds[-1] / known[-1] if len(known) > 1 else 0.02 * seconds[0]
        places = [*known, known[-1] + MAX_ROWS]
        values = [*seconds, seconds[-1] + slope * MAX_ROWS]
        self._base: list[float] = np.interp(range(MAX_ROWS + 1), places, values).tolist()
        self._has_scale = bool(pass_seconds)
        self._cells: dict[int, _Cell] = {}
        self._last = _Cell(1.0, 1.0, 1.0)

    def plain(self, batch: int) -> float:
        """Return the seconds of a pass without a draft before it."""
        return self._base[min(batch, MAX_ROWS)] * self._cell(batch).plain

    def curve(self, batch: int, num_nodes: int) -> list[float]:
        """Return the seconds of a pass after a draft over 0, 1, 2, … nodes more than the batch, never falling."""
        cell = self._cell(batch)
        first = min(batch, MAX_ROWS)
        least = (cell.drafted - cell.slope) * self._base[first]
        return [least + cell.slope * seconds for seconds in self._base[first : first + num_nodes + 1]]

    def observe(self, rows: int, batch: int, prefix: int, *, seconds: float, is_plain: bool = False) -> None:
        """Learn from a round's seconds without its draft; `is_plain` if no draft was made, not even an empty one."""
        first = self._base[min(batch, MAX_ROWS)]
        last = self._base[min(rows, MAX_ROWS)]
        if not self._has_scale:
            self._has_scale = True
            scale = seconds / last
            self._cells = {}
            self._last = _Cell(scale, scale, scale)
        self._last = cell = self._cell(batch)
        # a factor that was not seen for some rounds changes along with the others: the machine is slower or faster
        is_along = abs(cell.num_alike) >= AUTO.settled_rounds or cell.magnitude != prefix.bit_length()
        cell.magnitude = prefix.bit_length()
        if is_plain:
            change = change_of(cell.plain, seconds / first)
            if is_along:
                cell.drafted *= 1.0 + change / cell.plain
                cell.slope *= 1.0 + change / cell.plain
            cell.plain += change
            cell.num_alike = min(0, cell.num_alike) - 1
        else:
            more = last - first
            before = cell.drafted
            change = change_of(before * first + cell.slope * more, seconds) / (first * first + more * more)
            cell.drafted += change * first
            cell.slope = max(0.0, cell.slope + change * more)
            # no plain round takes longer than one with more rows
            cell.plain = min(cell.plain * (cell.drafted / before if is_along else 1.0), seconds / first)
            cell.num_alike = max(0, cell.num_alike) + 1

    def _cell(self, batch: int) -> _Cell:
        # a new batch size begins like the last one
        return self._cells.setdefault(batch if batch < 8 else 8 * batch.bit_length(), replace(self._last))


@dataclass(slots=True)
class DraftCosts:
    """Seconds of one drafter's calls, by levels, and of reading unread tokens. Mutated by `observe`."""

    first: float | None = None  # a head reads the accepted tokens with the first level
    further: float | None = None  # each; None before a draft of several levels
    unread_token: float = 0.0

    def observe(self, seconds: float, depth: int, *, unread: int = 0) -> None:
        """Learn from a draft of `depth` levels before which it had to read `unread` tokens."""
        if unread > MIN_UNREAD:
            each = max(0.0, seconds - (self.of(depth) or seconds / 2)) / unread
            self.unread_token = self.unread_token + change_of(self.unread_token, each) if self.unread_token else each
            return
        if self.first is None:
            self.first = seconds / depth
        steps = depth - 1
        if steps and self.further is None:
            self.further = min(self.first, max(0.0, seconds - self.first) / steps)
        change = change_of(self.of(depth), seconds) / (1 + steps * steps)
        self.first += change
        # noise must not make a further level dearer than the first, nor free
        self.further = self.further and min(max(self.further + change * steps, 0.1 * self.first), self.first)

    def catching_up(self, unread: int) -> float:
        """Return the seconds of reading tokens before a draft."""
        return self.unread_token * unread if unread > MIN_UNREAD else 0.0

    def of(self, depth: int) -> float:
        """Return the seconds of a draft of `depth` levels; 0 before the first draft."""
        first = self.first or 0.0
        return first + (depth - 1) * (first if self.further is None else self.further) if depth else 0.0


@dataclass(slots=True)
class Trials:
    """When something that does not pay is tried again. The first loss costs no wait: a text may begin with misses."""

    next: float = -math.inf  # seconds of the planner's clock from which a trial is due
    is_on: bool = False  # whether this round has one

    def lose(self, seconds: float, clock: float) -> None:
        """Wait until the loss of a trial is a small enough share of the time since."""
        self.next = clock + (seconds / AUTO.trial_share if self.next >= 0.0 else 0.0)


# Gain

# edges of the bins of a drafter's confidence, as log-probabilities
EDGES = tuple(map(math.log, (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 0.97, 0.99)))
CENTRES = tuple((math.exp(low) + math.exp(high)) / 2 for low, high in pairwise((-math.inf, *EDGES, 0.0)))
UNSCORED = (0.6, 0.125, 0.083, 0.063, 0.05)  # assumed acceptance by rank among siblings without a score


def shifted(chance: float, odds: float) -> float:
    """Return a probability with its odds multiplied."""
    return chance * odds / (1.0 - chance + chance * odds)


@dataclass(slots=True)
class Odds:
    """Hits and expected hits, of one sequence or of all kinds of a group; `factor` is that of the expected odds."""

    tries: float = 2.0 * AUTO.sequence_weight
    hits: float = AUTO.sequence_weight
    expected: float = AUTO.sequence_weight
    factor: float = 1.0

    def observe(self, expected: float, *, hit: bool) -> None:
        """Add an observation and its expected probability; older ones fade towards the prior."""
        keep = 1.0 - 1.0 / AUTO.sequence_memory
        rest = AUTO.sequence_weight / AUTO.sequence_memory
        self.tries = keep * self.tries + 2.0 * rest + 1.0
        self.hits = keep * self.hits + rest + hit
        self.expected = keep * self.expected + rest + expected
        self.factor = self.hits / self.expected * (self.tries - self.expected) / (self.tries - self.hits)


EVEN = Odds()
OwnOdds = dict[Hashable, Odds]  # of one sequence, by group


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of guesses: the prior is assumed with a weight in observations; the group's odds shift all its priors."""

    group: Hashable
    number: int
    prior: float
    weight: float


class Acceptance:
    """Probabilities of being accepted, by kind. Mutated by `observe`.

    The probability of a kind is the share of hits, beside a prior that counts as a few observations; the group's odds
    shift the prior, and a sequence's odds the result. `memory`: observations of a kind after which one counts 1/e.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._counts: dict[Hashable, tuple[float, float]] = {}
        self._odds: OwnOdds = {}

    def odds(self, group: Hashable) -> float:
        return self._odds.get(group, EVEN).factor

    def chance(self, kind: Kind, odds: OwnOdds | None = None) -> float:
        """Return the probability of a kind, in one sequence if its odds are given."""
        hits, tries = self._counts.get((kind.group, kind.number), (0.0, 0.0))
        chance = (hits + kind.weight * shifted(kind.prior, self.odds(kind.group))) / (tries + kind.weight)
        return shifted(chance, odds.get(kind.group, EVEN).factor) if odds else chance

    def observe(self, kind: Kind, odds: OwnOdds, *, hit: bool) -> None:
        odds.setdefault(kind.group, Odds()).observe(self.chance(kind), hit=hit)
        self._odds.setdefault(kind.group, Odds()).observe(kind.prior, hit=hit)
        hits, tries = self._counts.get((kind.group, kind.number), (0.0, 0.0))
        self._counts[kind.group, kind.number] = (self._keep * hits + hit, self._keep * tries + 1.0)


def choose_nodes(
    survivals: Sequence[Sequence[float]], curve: Sequence[float], *, num_sequences: int, sunk: float = 0.0
) -> list[list[int]]:
    """Return the nodes of every tree that maximize expected tokens per second of the round.

    No node survives more often than its parent, so the best nodes of each number are those of highest survival.

    Args:
        curve: seconds of a pass by number of nodes.
        num_sequences: of the pass; each writes a token besides.
        sunk: seconds that the round has taken so far.
    """
    ranked = sorted(
        (-survival, place, node)
        for place, tree_survivals in enumerate(survivals)
        for node, survival in enumerate(tree_survivals)
    )
    tokens = accumulate((-negative for negative, _, _ in ranked), initial=float(num_sequences))
    speeds = [number / (sunk + seconds) for number, seconds in zip(tokens, curve, strict=False)]
    best = speeds.index(max(speeds))
    kept: list[list[int]] = [[] for _ in survivals]
    for _, place, node in ranked[:best]:
        kept[place].append(node)
    return [sorted(nodes) for nodes in kept]


@dataclass(slots=True)
class SequenceEstimates:
    """Estimates for one sequence; lists and keys by drafter. Mutated every round."""

    is_sampled: bool
    trials: list[Trials]  # of lookups
    num_read: list[int]  # tokens that each drafter has read
    gains: dict[int, float] = field(default_factory=dict)  # tokens that a lookup's draft adds, less its rows' cost
    # levels of drafters that run a model, with their acceptance given the level above
    levels: dict[int, list[tuple[Kind, float]]] = field(default_factory=dict)
    odds: OwnOdds = field(default_factory=dict)
    length: int = 0  # as of the last round; 0 before the first one
    tree: TokenTree = EMPTY  # the last draft
    kinds: list[Kind] = field(default_factory=list)  # of its nodes


@dataclass(slots=True)
class PartPlan:
    """One drafter's estimates, and its plan for the round. Mutated every round."""

    part: DraftPart
    costs: DraftCosts = field(default_factory=DraftCosts)  # of one sequence's draft for a lookup
    gain: float = 0.5  # of a lookup, over all sequences
    rate: float = 0.0  # acceptance of the first level in the first sequence
    asked: list[int] = field(default_factory=list)  # levels by sequence
    conditions: list[DraftCondition | None] = field(default_factory=list)
    min_survival: float = 0.0
    trials: Trials = field(default_factory=Trials)  # of a drafter that runs a model
    is_on: bool = False  # whether it is expected to pay for any sequence


# places in the batch, states and records of sequences that were to have a draft
Drafts = Sequence[tuple[int, SequenceEstimates, SequenceRecord]]


@final
class AdaptivePlanner(Planner[SequenceEstimates]):
    """Compares every node and every level with plain decoding."""

    wants_costs = True

    @dataclass(frozen=True, slots=True)
    class Config:
        """`memory`: guesses of a kind after which an observation counts 1/e; `nodes`: most nodes of a sequence."""

        memory: float = 80.0
        nodes: int | None = field(default=None, metadata={"limits": "nodes"})

        def __post_init__(self) -> None:
            if not 1 <= self.memory < math.inf:
                raise ConfigurationError(f"planner 'adaptive' has memory={self.memory}: give a number of at least 1")
            if self.nodes is not None and self.nodes < 1:
                raise ConfigurationError(f"planner 'adaptive' has nodes={self.nodes}: it must be at least 1")

    def __init__(self, config: Any, **draft: Any) -> None:
        super().__init__(config, **draft)
        self._limit = min(self.default_nodes, config.nodes or self.default_nodes)
        self._passes = PassCosts()
        self._acceptance = Acceptance(config.memory)
        self._plans = [PartPlan(part) for part in self.parts]
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._owners_of: dict[tuple[str, ...], Sequence[int]] = {}
        self._clock = 0.0  # seconds of all rounds so far
        self._num_scored = 0  # nodes of the last round
        self._batch = self._num_sequences = 1  # sequences of this planner, and of the pass
        self._others = self._other_rows = 0  # sequences of the round that others plan, and their rows
        self._num_idle = 0  # rounds without a decision that are left
        self._is_idle = False  # whether this is one
        self._survivals: list[list[float]] = []  # of the scored nodes, if the trees were pruned
        self._plain = 0.0  # seconds of a pass without a draft
        self._curve: list[float] = []  # seconds of a pass after a draft, by scored nodes
        self._overhead = 0.0  # seconds of planning and learning in a round with a draft

    def learn_costs(self, pass_seconds: Mapping[int, float]) -> None:
        super().learn_costs(pass_seconds)
        self._passes.learn(pass_seconds)

    def note_others(self, num_sequences: int, num_rows: int) -> None:
        """Count others' sequences in the costs of passes; they write one token each, as far as is known."""
        if num_sequences != self._others:
            self._num_idle = 0
        self._others, self._other_rows = num_sequences, num_rows

    def open(self, *, is_sampled: bool = False) -> SequenceEstimates:
        """Return the estimates of a sequence without an observation."""
        self._num_idle = 0
        return SequenceEstimates(is_sampled, [Trials() for _ in self.parts], [0] * len(self.parts))

    def budgets(self, states: Sequence[SequenceEstimates]) -> list[Budget]:
        """Return the depth of each drafter for every sequence."""
        batch = len(states)
        self._is_idle = self._num_idle > 0 and batch == self._batch
        self._num_idle -= 1
        if not self._limit or not batch or self._is_idle:
            return [NOTHING] * batch
        self._batch = batch
        self._survivals = []
        self._num_sequences = batch + self._others
        self._curve = self._passes.curve(self._num_sequences, batch * self._limit)
        self._plain = self._passes.plain(self._num_sequences)
        tokens = float(self._num_sequences)
        seconds = self._plain
        # lookups first: a drafter that runs a model is judged by what it adds
        for index in sorted(range(len(self._plans)), key=lambda index: self._plans[index].part.runs_model):
            decide = self._plan_model if self._plans[index].part.runs_model else self._plan_lookup
            tokens, seconds = decide(index, states, tokens, seconds)
        if not any(any(plan.asked) for plan in self._plans):
            due = [
                plan.trials.next if plan.part.runs_model else min(state.trials[index].next for state in states)
                for index, plan in enumerate(self._plans)
            ]
            self._num_idle = int((min(due) - self._clock) / self._plain)
        budgets = []
        for place in range(batch):
            depths = tuple([min(plan.asked[place], self._limit) for plan in self._plans])
            stops = [plan.min_survival for plan in self._plans if plan.asked[place] and plan.min_survival]
            conditions = tuple([plan.conditions[place] for plan in self._plans])
            budget = Budget(
                self._limit if any(depths) else 0,
                max(depths),
                part_depths=depths if len(depths) > 1 else (),
                min_survival=min(stops, default=0.0),
                conditions=conditions if any(conditions) else (),
            )
            budgets.append(budget)
        return budgets

    def _plan_lookup(
        self, index: int, states: Sequence[SequenceEstimates], tokens: float, seconds: float
    ) -> tuple[float, float]:
        """Draft where recent drafts paid or a trial is due; return expected tokens and seconds of the round."""
        plan = self._plans[index]
        batch = len(states)
        each = plan.costs.of(1)
        value = self._plain / self._num_sequences
        margin = 1.0 if self._num_sequences == 1 else AUTO.batch_margin
        # in a batch, a new text has trials only until a draft paid
        gains = [state.gains.setdefault(index, plan.gain if batch == 1 else 0.0) for state in states]
        surplus = [gain * value - margin * each for gain in gains]
        plan.is_on = sum(seconds for seconds in surplus if seconds > 0.0) > self._overhead
        plan.conditions = [None] * batch
        plan.asked = []
        for state, paid in zip(states, surplus, strict=True):
            trials = state.trials[index]
            pays = plan.is_on and paid > 0.0
            trials.is_on = not pays and self._clock >= trials.next
            plan.asked.append(plan.part.depth if pays or trials.is_on else 0)
        drafting = [max(0.0, gain) for gain, depth in zip(gains, plan.asked, strict=True) if depth]
        if not drafting:
            return tokens, seconds
        return tokens + sum(drafting), seconds + each * len(drafting) + self._overhead

    def _plan_model(
        self, index: int, states: Sequence[SequenceEstimates], tokens: float, seconds: float
    ) -> tuple[float, float]:
        """Draft as many levels as pay, or one as a trial; as `_plan_lookup`."""
        plan = self._plans[index]
        batch = len(states)
        depth = self.parts[index].depth
        rates = [self._rates(index, state) for state in states]
        gains = [list(accumulate(level_rates, mul)) for level_rates in rates]
        unread = sum(max(0, state.length - state.num_read[index]) for state in states)
        best_depth = 0
        best_tokens = tokens
        best_seconds = seconds
        spent = seconds + plan.costs.catching_up(unread) / AUTO.catch_up_rounds
        if seconds == self._plain:  # no draft of this round has paid for planning and for a slower pass
            spent += self._overhead + max(0.0, self._curve[0] - self._plain)
        total = tokens
        rows = 0.0
        reach = float(batch)
        for level in range(depth):
            further = plan.costs.of(level + 1) - plan.costs.of(level)
            spent += min(1.0, reach) * further + self._row_seconds(rows + reach) - self._row_seconds(rows)
            gain = sum(level_gains[level] for level_gains in gains)
            total, rows = total + gain, rows + reach
            # a calibrated drafter goes on where its tokens are likely to survive: about as often as they do
            reach = gain if plan.part.is_calibrated else reach
            if total / spent > best_tokens / best_seconds:
                best_depth = level + 1
                best_tokens = total
                best_seconds = spent
        best_speed = best_tokens / best_seconds
        plan.rate = rates[0][0]
        plan.is_on = best_depth > 0
        plan.trials.is_on = False
        plan.min_survival = 0.0
        plan.conditions = [None] * batch
        least = 0.0
        if best_depth:
            # half of a draft's cost is common, and each sequence must regain its part of the rest
            least = best_speed * plan.costs.of(best_depth) / (2 * batch) if batch > 1 else 0.0
            cost = (best_seconds - seconds) * best_speed / batch
            plan.conditions = [self._condition(place, level_gains, cost) for place, level_gains in enumerate(gains)]
            if plan.part.is_calibrated:
                further = (plan.costs.of(2) - plan.costs.of(1)) / batch + self._row_seconds(1)
                rate = rates[0][min(1, depth - 1)]
                plan.min_survival = min(1.0, 1e-3 + best_speed * further / rate) if rate else 1.0
                best_depth = depth
            if plan.costs.further is None:  # the cost of the first level shows with one draft, of others with a second
                best_depth = min(depth, 1 if plan.costs.first is None else 2)
        elif self._clock >= plan.trials.next:
            best_depth = 1
            plan.trials.is_on = True
        plan.asked = [best_depth if sum(level_gains[:best_depth]) >= least else 0 for level_gains in gains]
        return best_tokens, best_seconds

    def _rates(self, index: int, state: SequenceEstimates) -> list[float]:
        """Return the acceptance of each level of a drafter in a sequence, given that of the level above."""
        part = self.parts[index]
        group = (index, state.is_sampled)
        above = 0.5
        known = part.sampled_rates if state.is_sampled else part.greedy_rates
        state.levels[index] = levels = []
        for level in range(part.depth):
            # a level of an unknown drafter is taken to be like the one above
            prior = known[min(level, len(known) - 1)] if known else above
            kind = Kind(group, level, prior, AUTO.known_weight if known else AUTO.prior_weight)
            above = self._acceptance.chance(kind)
            levels.append((kind, self._acceptance.chance(kind, state.odds)))
        return [rate for _, rate in levels]

    def _row_seconds(self, count: float) -> float:
        """Return the seconds of a mean number of nodes in the pass."""
        low, high = (self._curve[min(int(count) + more, len(self._curve) - 1)] for more in (0, 1))
        return low + (count - int(count)) * (high - low) - self._curve[0]

    def _condition(self, place: int, gains: Sequence[float], least: float) -> DraftCondition | None:
        """Return what a draft must add to those of lookups, which draft before."""
        lookups = [plan for plan in self._plans if not plan.part.runs_model and plan.asked[place]]
        odds = [self._acceptance.odds((plan.part.name,)) for plan in lookups if plan.part.gives_confidence]
        return DraftCondition(tuple(gains), least, min(1.0, *odds)) if odds else None

    def trim(
        self, states: Sequence[SequenceEstimates], trees: Sequence[TokenTree], *, draft_seconds: float
    ) -> list[Sequence[int] | None]:
        """Return the nodes that are worth a row: as many of the highest survival as maximize tokens per second."""
        survivals = [self._survivals_in(state, tree) for state, tree in zip(states, trees, strict=True)]
        kept = choose_nodes(survivals, self._curve, num_sequences=self._num_sequences, sunk=draft_seconds)
        self._survivals = [
            [tree_survivals[node] for node in nodes] for tree_survivals, nodes in zip(survivals, kept, strict=True)
        ]
        return [None if len(nodes) == len(tree) else nodes for nodes, tree in zip(kept, trees, strict=True)]

    def _survivals_in(self, state: SequenceEstimates, tree: TokenTree) -> list[float]:
        """Return the probability of each node that it and its ancestors are accepted."""
        survivals: list[float] = []
        for parent, kind in zip(tree.parents, self._kinds_in(state, tree), strict=True):
            chance = self._acceptance.chance(kind, state.odds)
            survivals.append(chance if parent < 0 else chance * survivals[parent])
        return survivals

    def _kinds_in(self, state: SequenceEstimates, tree: TokenTree) -> list[Kind]:
        """Return the kind of every node: the bin of its confidence, or its rank among its siblings without one."""
        if state.tree is tree:
            return state.kinds
        num_children = [0] * (len(tree) + 1)
        state.tree = tree
        state.kinds = []
        for node, parent in enumerate(tree.parents):
            rank = num_children[parent + 1]
            num_children[parent + 1] += 1
            confidence = tree.scores[node] - (tree.scores[parent] if parent >= 0 else 0.0) if tree.scores else 0.0
            # a drafter without probabilities gives each of its tokens 1
            number = bisect_left(EDGES, confidence) if confidence < -1e-4 else ~min(rank, len(UNSCORED) - 1)
            group = tree.sources[node] if tree.sources else ()
            kind = self._kinds.get((group, number))
            if kind is None:
                prior = UNSCORED[~number] if number < 0 else CENTRES[number]
                is_known = number >= 0 and all(self.parts[index].is_calibrated for index in self._owners(group))
                weight = AUTO.known_weight if is_known else AUTO.prior_weight
                kind = self._kinds[group, number] = Kind(group, number, prior, weight)
            state.kinds.append(kind)
        return state.kinds

    def _owners(self, sources: tuple[str, ...]) -> Sequence[int]:
        """Return the drafters of a node."""
        if sources not in self._owners_of:
            names = [f"{part.name}/" for part in self.parts]
            owners = [i for i, name in enumerate(names) if any(f"{source}/".startswith(name) for source in sources)]
            self._owners_of[sources] = owners or [0]
        return self._owners_of[sources]

    def _levels(self, index: int, tree: TokenTree) -> list[int]:
        """Return the level of each node of a drafter, and 0 for the nodes of others."""
        pairs = zip(depths(tree.parents), tree.sources or [()] * len(tree), strict=True)
        return [level if index in self._owners(names) else 0 for level, names in pairs]

    def observe(self, states: Sequence[SequenceEstimates], record: RoundRecord) -> None:
        batch = len(states)
        rows = record.sequences
        self._clock += record.total_seconds
        self._num_scored = sum(row.num_drafted for row in rows)
        has_draft = not self._is_idle and any(any(plan.asked) for plan in self._plans)
        if batch and record.num_rows == self._other_rows + batch + self._num_scored:
            # rounds that read a prompt do not measure a pass
            seconds = record.total_seconds - record.draft_seconds
            prefix = max(row.prefix_length for row in rows)
            self._passes.observe(record.num_rows, self._others + batch, prefix, seconds=seconds, is_plain=not has_draft)
        if has_draft:
            sample = 2.0 * record.plan_seconds  # learning takes about as long as planning
            self._overhead += change_of(self._overhead, sample) if self._overhead else sample
            num_asked = sum(any(plan.asked) for plan in self._plans)
            for index, plan in enumerate(self._plans):
                members = zip(range(batch), states, rows, strict=True)
                # without room for a draft, none was made
                drafts = [member for member in members if plan.asked[member[0]] and member[2].room != 1]
                # of empty drafts only the sum is known
                seconds = record.part_seconds[index] if record.part_seconds else record.draft_seconds / num_asked
                if drafts:
                    (self._observe_model if plan.part.runs_model else self._observe_lookup)(index, drafts, seconds)
            for state, row in zip(states, rows, strict=True):
                if row.bonus is not None and len(row.drafted):
                    self._observe_nodes(state, row.drafted, continuation(row))
        for state, row in zip(states, rows, strict=True):
            state.length = row.prefix_length + row.num_written

    def _observe_nodes(self, state: SequenceEstimates, tree: TokenTree, text: Sequence[int]) -> None:
        """Learn from every node, scored or not, that follows a token of the text but the last."""
        hits = follow(tree, text)
        known = {ROOT, *hits[: len(text) - 1]}
        for node, (parent, kind) in enumerate(zip(tree.parents, self._kinds_in(state, tree), strict=True)):
            if parent in known:
                self._acceptance.observe(kind, state.odds, hit=node in hits)

    def _observe_model(self, index: int, drafts: Drafts, seconds: float) -> None:
        """Learn the cost of a drafter's levels, and their acceptance."""
        plan = self._plans[index]
        depth_of = {place: max(self._levels(index, row.drafted), default=0) for place, _, row in drafts}
        depth = max(depth_of.values())
        if not depth:
            return
        unread = num_hits = 0
        for place, state, row in drafts:
            # it may be skipped by its condition, or not be ready before the first round
            if depth_of[place] or (state.length and plan.conditions[place] is None):
                unread += max(0, row.prefix_length - state.num_read[index])
                state.num_read[index] = row.prefix_length + row.num_written
                num_hits += self._observe_levels(index, state, row)
        plan.costs.observe(seconds, depth, unread=unread)
        cost = plan.costs.of(depth) + plan.costs.catching_up(unread) + self._overhead
        loss = cost + self._row_seconds(self._num_scored) - num_hits * self._plain / self._num_sequences
        if plan.trials.is_on and loss > 0.0:
            plan.trials.lose(loss, self._clock)

    def _observe_levels(self, index: int, state: SequenceEstimates, row: SequenceRecord) -> int:
        """Learn from one sequence's draft; return how many scored levels of it the text has.

        Except in a trial, a level counts only if it was scored: a node that is not worth a row adds nothing.
        """
        if row.bonus is None:
            return 0
        tree = row.drafted if self._plans[index].trials.is_on else row.tree
        text = continuation(row)
        levels = self._levels(index, tree)
        num_hits = len(list(takewhile(lambda node: levels[node], follow(tree, text))))
        num_known = min(num_hits + 1, len(text), max(self._plans[index].asked))
        for level, (kind, _) in enumerate(state.levels[index][:num_known]):
            self._acceptance.observe(kind, state.odds, hit=level < num_hits)
        return min(num_hits, len(row.path))

    def _observe_lookup(self, index: int, drafts: Drafts, seconds: float) -> None:
        """Average what a lookup's drafts brought, less the cost of their rows."""
        plan = self._plans[index]
        value = self._plain / self._num_sequences
        plan.costs.observe(seconds / len(drafts), 1)
        row_tokens = self._row_seconds(self._num_scored) / max(1, self._num_scored) / value
        each = plan.costs.of(1) + self._overhead / len(drafts)
        for place, state, row in drafts:
            survivals = self._survivals[place] if self._survivals else self._survivals_in(state, row.tree)
            levels = self._levels(index, row.tree)
            gain = sum([s - row_tokens for s, level in zip(survivals, levels, strict=True) if level])
            plan.gain += (gain - plan.gain) / (AUTO.lookup_memory * len(drafts))
            state.gains[index] += (gain - state.gains[index]) / AUTO.lookup_memory
            if state.trials[index].is_on:
                state.trials[index].lose(self._batch * max(0.0, each - gain * value), self._clock)

    def explain(self) -> str:
        """Return the costs and gains that the last budgets follow from."""
        return "; ".join(map(self._reason, self._plans))

    def _reason(self, plan: PartPlan) -> str:
        name = "" if len(self._plans) == 1 or not plan.part.name else f"{plan.part.name}: "
        if plan.costs.first is None:
            return f"{name}nothing has been drafted yet"
        level = plan.costs.first / self._plain
        row = self._row_seconds(1) / self._plain
        if not plan.part.runs_model:
            return (
                f"{name}a draft costs {level:.3f} of a target pass, so its tree is judged afterwards; a further node "
                f"costs {row:.3f}, and scored nodes add {max(0.0, plan.gain):.2f} tokens a round: "
                f"{'on' if plan.is_on else 'off, tried at intervals'}"
            )
        depth = max(plan.asked, default=0)
        unread = plan.costs.unread_token / self._plain
        state = f"{depth} level{'s' if depth > 1 else ''}" if plan.is_on else "off"
        reading = f", an unread token {unread:.3f}" if unread >= 0.001 else ""
        return (
            f"{name}a draft level costs {level:.2f} of a target pass{reading}; break-even acceptance "
            f"{level + row:.2f}; measured {plan.rate:.2f}: {state}"
        )


def continuation(row: SequenceRecord) -> list[int]:
    """Return the known tokens after the text before the round: the accepted ones and the bonus."""
    assert row.bonus is not None, "a failed sequence has no continuation"
    return [*(row.tree.tokens[node] for node in row.path), row.bonus]
