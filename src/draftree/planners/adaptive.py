"""Drafts where measured costs and calibrated acceptance promise more tokens per second.

Every decision compares expected tokens per second of the round with those of another one. Three parts make it up:

* *Cost.* A pass costs seconds by its rows, a draft by its levels, both measured in every round.
* *Gain.* A drafted node survives with a probability that is calibrated by the drafter's own confidence, and a level of
  a drafter that runs a model adds the product of the acceptance of the levels down to it. Both are learned from all
  drafted nodes whose fate the text shows, scored or not, and shifted by what was seen in the sequence itself.
* *Exploration.* What does not pay is tried again once the loss of its last trial is at most a stated share of the time
  since. No draft is made that could bring the loss of all drafts since the start above another share and `allowance`.

A lookup drafts first, and its tree is pruned then: over the whole batch the nodes of highest survival are scored, as
many as maximize expected tokens over expected seconds. Of the drafters that run a model, the one that promises the most
tokens per second drafts as many levels as pay, if any does; with calibrated scores it stops where a further level would
cost more than it gains, and beside a lookup it drafts only where it adds enough.

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
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile
from operator import mul
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, ROOT, TokenTree, depths, follow
from draftree.core.types import Budget, DraftCondition, DraftPart, RoundRecord, SequenceRecord
from draftree.planners.base import Planner, Standing
from draftree.planners.estimates.costs import DraftCosts, PassCosts, change_of

NOTHING = Budget(0, 0)


@dataclass(frozen=True, slots=True)
class AutoConstants:
    """Numbers that `adaptive` is tuned by; docs/lab/auto.md compares each with its neighbours."""

    loss_share: float = 0.02  # share of the time that drafts may lose, half of it in trials of what does not pay
    allowance: float = 1.0  # passes that they may lose besides
    patience: float = 8.0  # trials in a row without a hit that lengthen the wait for the next by as much again
    context_rounds: int = 4  # rounds before a trial from which hidden states are kept for it
    catch_up_rounds: int = 32  # rounds over which the cost of reading the unread text must be regained
    lookup_memory: int = 6  # drafts over which the gain of a lookup is averaged
    prior_weight: float = 3.0  # weight in observations of what is assumed of an unknown drafter
    known_weight: float = 20.0  # the same for a drafter whose acceptance was measured before
    sequence_weight: float = 12.0  # weight in observations of all sequences' acceptance beside a sequence's own
    sequence_memory: float = 32.0  # observations over which a sequence's own acceptance is averaged


AUTO = AutoConstants()


@dataclass(slots=True)
class Trials:
    """When something that does not pay is tried again."""

    next: float = 0.0  # seconds of the planner's clock from which a trial is due
    lost: float = 0.0  # seconds that trials have lost
    is_on: bool = False  # whether this round has one

    def lose(self, seconds: float, clock: float, *, free: float = 0.0, wait: float = 1.0) -> None:
        """Wait until the loss is a small share of the time since, but not after the first one, nor up to `free`.

        `wait`: factor of that time.
        """
        self.next = clock + (wait * 2.0 * seconds / AUTO.loss_share if self.lost > free else 0.0)
        self.lost += seconds


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
    trials: list[Trials]  # of lookups, by drafter
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
    is_on: bool = False  # whether it is expected to pay for any sequence
    # of a drafter that runs a model
    levels: int = 0  # that pay
    last: float = 0.0  # seconds of the planner's clock at its last draft
    num_new: int = 0  # drafts before its costs were known
    num_drafts: int = 0
    num_hits: int = 0  # drafts whose first token was right
    num_missed: int = 0  # trials since one had a hit, over all texts
    num_lost: int = 0  # trials that it has lost since it last drafted otherwise
    released: str = ""  # why it drafts no more


@dataclass(frozen=True, slots=True)
class Offer:
    """Levels of a drafter, and what the round with them is expected to write and to take."""

    levels: int
    tokens: float
    seconds: float
    gains: Sequence[Sequence[float]]  # expected tokens of every level in each sequence

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


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
        self._credit = 0.0  # seconds that drafts may lose besides the allowance: a share of the time, and their gain
        self._risk = 0.0  # seconds that the round may lose
        self._rivals = [index for index, part in enumerate(self.parts) if part.runs_model]  # at most one drafts
        self._trials = Trials()  # of them
        self._trial: int | None = None  # the drafter that is tried in this round
        self._without = (1.0, 1.0)  # tokens and seconds of the round without such a drafter
        self._speed = 1.0  # tokens per second of the round without the trial

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
        for plan in self._plans:
            plan.asked, plan.conditions, plan.min_survival = [0] * batch, [None] * batch, 0.0
        self._risk = AUTO.allowance * self._plain + self._credit
        tokens = float(self._num_sequences)
        seconds = self._plain
        # lookups first: a drafter that runs a model is judged by what it adds
        for index, plan in enumerate(self._plans):
            if not plan.part.runs_model:
                tokens, seconds = self._plan_lookup(index, states, tokens, seconds)
        seconds = self._plan_models(states, tokens, seconds)
        missing = seconds - self._plain - self._risk
        if missing > 0.0:
            for plan in self._plans:
                plan.asked = [0] * batch
        if not any(any(plan.asked) for plan in self._plans):
            times = [
                self._trials.next if plan.part.runs_model else min(state.trials[index].next for state in states)
                for index, plan in enumerate(self._plans)
                if not plan.released
            ]
            due = min(times, default=self._clock)
            self._num_idle = int(max(missing / AUTO.loss_share, due - self._clock) / self._plain)
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

    def needs_states(self) -> bool:
        is_asked = not self._is_idle and any(any(self._plans[index].asked) for index in self._rivals)
        wait = max(self._num_idle * self._plain, self._trials.next - self._clock)
        return is_asked or wait < AUTO.context_rounds * self._plain

    def idle_rounds(self) -> int:
        return max(0, self._num_idle - (AUTO.context_rounds if self._rivals else 0))

    def _plan_lookup(
        self, index: int, states: Sequence[SequenceEstimates], tokens: float, seconds: float
    ) -> tuple[float, float]:
        """Draft where recent drafts paid or a trial is due; return expected tokens and seconds of the round."""
        plan = self._plans[index]
        batch = len(states)
        each = plan.costs.of(1)
        value = self._plain / self._num_sequences
        # in a batch, a new text has trials only until a draft paid
        gains = [state.gains.setdefault(index, plan.gain if batch == 1 else 0.0) for state in states]
        surplus = [gain * value - each for gain in gains]
        plan.is_on = sum(seconds for seconds in surplus if seconds > 0.0) > self._overhead
        for place, (state, paid) in enumerate(zip(states, surplus, strict=True)):
            trials = state.trials[index]
            pays = plan.is_on and paid > 0.0
            trials.is_on = not pays and self._clock >= trials.next
            plan.asked[place] = plan.part.depth if pays or trials.is_on else 0
        drafting = [max(0.0, gain) for gain, depth in zip(gains, plan.asked, strict=True) if depth]
        if not drafting:
            return tokens, seconds
        return tokens + sum(drafting), seconds + each * len(drafting) + self._overhead

    def _plan_models(self, states: Sequence[SequenceEstimates], tokens: float, seconds: float) -> float:
        """Draft with the drafter whose levels pay most, or one level of another one as a trial; return the seconds.

        Args:
            tokens: expected tokens of the round without a drafter that runs a model.
            seconds: its expected seconds.
        """
        self._trial = None
        self._without = tokens, seconds
        self._speed = tokens / seconds
        offers = {index: self._offer(index, states, tokens, seconds) for index in self._rivals}
        best = max(offers, key=lambda index: offers[index].speed, default=None)
        if best is not None and offers[best].levels:
            self._speed = offers[best].speed
            self._accept(self._plans[best], offers[best])
            seconds = offers[best].seconds
        for index in self._rivals:
            self._plans[index].is_on = index == best and offers[index].levels > 0
        others = [index for index in self._rivals if not self._plans[index].is_on]
        # beside one that pays, others are tried once it has gained a pass, or may not draft itself
        needed = 2.0 * AUTO.allowance * self._plain if len(others) < len(self._rivals) else 0.0
        is_open = self._risk >= needed or self._risk < seconds - self._plain
        if others and is_open and self._clock >= self._trials.next:
            # one that was not measured yet, or else the one whose last draft was the longest ago
            self._trial = min(others, key=lambda index: self._plans[index].last * bool(self._plans[index].costs.first))
            for plan in self._plans:
                if plan.part.runs_model:
                    plan.asked = [int(plan is self._plans[self._trial])] * len(states)
            seconds = self._without[1] + self._row_seconds(len(states))
        return seconds

    def _offer(self, index: int, states: Sequence[SequenceEstimates], tokens: float, seconds: float) -> Offer:
        """Return as many levels of a drafter as pay."""
        plan = self._plans[index]
        depth = plan.part.depth
        rates = [self._rates(index, state) for state in states]
        gains = [list(accumulate(level_rates, mul)) for level_rates in rates]
        plan.rate = rates[0][0]
        best = Offer(0, tokens, seconds, gains)
        if plan.costs.first is None:  # its first drafts are trials
            return best
        unread = sum(max(0, state.length - state.num_read[index]) for state in states)
        spent = seconds + plan.costs.catching_up(unread) / AUTO.catch_up_rounds
        if seconds == self._plain:  # no draft of this round has paid for planning and for a slower pass
            spent += self._overhead + max(0.0, self._curve[0] - self._plain)
        rows = 0.0
        reach = float(len(states))
        for level in range(depth):
            further = plan.costs.of(level + 1) - plan.costs.of(level)
            spent += min(1.0, reach) * further + self._row_seconds(rows + reach) - self._row_seconds(rows)
            gain = sum(level_gains[level] for level_gains in gains)
            tokens, rows = tokens + gain, rows + reach
            # a calibrated drafter goes on where its tokens are likely to survive: about as often as they do
            reach = gain if plan.part.is_calibrated else reach
            if tokens / spent > best.speed:
                best = Offer(level + 1, tokens, spent, gains)
        return best

    def _accept(self, plan: PartPlan, offer: Offer) -> None:
        """Ask a drafter for the levels that pay, where they do."""
        batch = len(offer.gains)
        plan.levels = offer.levels
        # half of a draft's cost is common, and each sequence must regain its part of the rest
        least = offer.speed * plan.costs.of(plan.levels) / (2 * batch) if batch > 1 else 0.0
        cost = (offer.seconds - self._without[1]) * offer.speed / batch
        plan.conditions = [self._condition(place, gains, cost) for place, gains in enumerate(offer.gains)]
        if plan.part.is_calibrated:
            further = (plan.costs.of(2) - plan.costs.of(1)) / batch + self._row_seconds(1)
            first, second = offer.gains[0][0], offer.gains[0][min(1, plan.part.depth - 1)]
            # the gain of a level is that of the one above times its acceptance
            rate = plan.rate if plan.part.depth == 1 else second / first if first else 0.0
            plan.min_survival = min(1.0, 1e-3 + offer.speed * further / rate) if rate else 1.0
            plan.levels = plan.part.depth
        if plan.costs.further is None:  # the cost of further levels shows with a second one
            plan.levels = min(plan.part.depth, 2)
        plan.asked = [plan.levels if sum(gains[: plan.levels]) >= least else 0 for gains in offer.gains]

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
            # of a folder and a folder in it, the longer name
            longest = (max((n for n in names if f"{source}/".startswith(n)), key=len, default="") for source in sources)
            self._owners_of[sources] = sorted({names.index(name) for name in longest if name}) or [0]
        return self._owners_of[sources]

    def _levels(self, index: int, tree: TokenTree) -> list[int]:
        """Return the level of each node of a drafter, and 0 for the nodes of others."""
        pairs = zip(depths(tree.parents), tree.sources or [()] * len(tree), strict=True)
        return [level if index in self._owners(names) else 0 for level, names in pairs]

    def observe(self, states: Sequence[SequenceEstimates], record: RoundRecord) -> None:
        batch = len(states)
        rows = record.sequences
        self._clock += record.total_seconds
        self._credit += AUTO.loss_share * record.total_seconds
        self._num_scored = sum(row.num_drafted for row in rows)
        has_draft = not self._is_idle and any(any(plan.asked) for plan in self._plans)
        if batch and record.num_rows == self._other_rows + batch + self._num_scored:
            # rounds that read a prompt do not measure a pass
            seconds = record.total_seconds - record.draft_seconds
            prefix = max(row.prefix_length for row in rows)
            self._passes.observe(record.num_rows, self._others + batch, prefix, seconds=seconds, is_plain=not has_draft)
        if has_draft:
            saved = sum(row.num_in_path for row in rows) * self._plain / self._num_sequences
            self._credit += saved - self._overhead - max(0.0, self._curve[self._num_scored] - self._plain)
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
        plan.last = self._clock
        is_new = plan.costs.first is None
        plan.costs.observe(seconds, depth, unread=unread)
        cost = plan.costs.of(depth) + plan.costs.catching_up(unread)
        # a first draft may load code or memory: it counts as much as the next one
        self._credit -= 0.0 if is_new else cost * (1 + plan.num_new)
        plan.num_new = plan.num_new + 1 if is_new else 0
        if index == self._trial:
            tokens, before = self._without
            spent = before + cost + self._overhead + self._row_seconds(self._num_scored)
            loss = spent - (tokens + num_hits) / self._speed
            plan.num_missed = 0 if num_hits else plan.num_missed + 1
            if loss > 0.0 and not is_new:
                plan.num_lost += 1
                wait = 1.0 + plan.num_missed / AUTO.patience
                self._trials.lose(loss, self._clock, free=AUTO.allowance * self._plain, wait=wait)
        else:
            plan.num_lost = 0

    def _observe_levels(self, index: int, state: SequenceEstimates, row: SequenceRecord) -> int:
        """Learn from one sequence's draft; return how many scored levels of it the text has.

        Except in a trial, a level counts only if it was scored: a node that is not worth a row adds nothing.
        """
        if row.bonus is None:
            return 0
        plan = self._plans[index]
        text = continuation(row)
        first = follow(row.drafted, text)[:1]
        plan.num_drafts += 1
        plan.num_hits += any(self._levels(index, row.drafted)[node] for node in first)
        tree = row.drafted if index == self._trial else row.tree
        levels = self._levels(index, tree)
        num_hits = len(list(takewhile(lambda node: levels[node], follow(tree, text))))
        num_known = min(num_hits + 1, len(text), max(plan.asked))
        for level, (kind, _) in enumerate(state.levels[index][:num_known]):
            self._acceptance.observe(kind, state.odds, hit=level < num_hits)
        return min(num_hits, len(row.path))

    def _observe_lookup(self, index: int, drafts: Drafts, seconds: float) -> None:
        """Average what a lookup's drafts brought, less the cost of their rows."""
        plan = self._plans[index]
        value = self._plain / self._num_sequences
        plan.costs.observe(seconds / len(drafts), 1)
        self._credit -= min(plan.costs.of(1) * len(drafts), self._plain)
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

    def standings(self) -> list[Standing]:
        return [
            Standing(index, plan.is_on, plan.num_drafts, plan.num_hits, plan.num_lost)
            for index, plan in enumerate(self._plans)
            if index in self._rivals
        ]

    def release(self, part: int, reason: str) -> None:
        self._rivals.remove(part)
        self._plans[part].released = reason
        self._plans[part].is_on = False

    def explain(self) -> str:
        """Return the costs and gains that the last budgets follow from."""
        return "; ".join(map(self._reason, self._plans))

    def _reason(self, plan: PartPlan) -> str:
        name = "" if len(self._plans) == 1 or not plan.part.name else f"{plan.part.name}: "
        if plan.released:
            return f"{name}released, {plan.released}"
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
        depth = plan.levels
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
