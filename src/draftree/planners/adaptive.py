"""Drafts where the measured costs of passes and drafts and the learned acceptance promise more tokens per second.

A drafter whose calls are cheap drafts first and its tree is pruned then: over the whole batch, the nodes of the highest
survival are scored, as many as maximise expected tokens over expected seconds. One that runs a model drafts as many
levels as its earlier levels suggest will pay, or none; each of several merged drafters is judged apart. A head begins
with the acceptance that its training measured; with calibrated scores it stops where a further level would cost more
than it gains, and beside a lookup it drafts only where it adds enough. What does not pay is tried again by one schedule
with exponential back-off, whose trials cost at most a stated share of the time.

Source: goodput from measured cost, as SmartSpec, arXiv 2406.14066; best-first sizes, as OPT-Tree, arXiv 2406.17276,
with calibrated chances in place of the drafter's own. Costs a few passes before the first round and some tens of
microseconds a round. Loses to the best fixed length where acceptance changes faster than it learns. Plans depend on the
clock; under a rule whose text depends on the draft the text does, too. There, and for a drafter that works ahead,
`fixed` is the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import TokenTree
from draftree.core.types import Budget, DraftCondition, RoundRecord, SequenceRecord
from draftree.planners.base import Planner
from draftree.planners.estimates.constants import AUTO
from draftree.planners.estimates.costs import PassCosts
from draftree.planners.estimates.gains import (
    Acceptance,
    Credit,
    Credits,
    Prices,
    SequenceAcceptance,
    TrialSchedule,
    net_gains,
)
from draftree.planners.estimates.plans import (
    Depth,
    PartPlan,
    SequenceEstimates,
    budget_of,
    choose_nodes,
    conditions_of,
    note_drafted,
    sentence,
)

NOTHING = Budget(0, 0)
MAX_ROWS = 1024
"""Rows up to which the cost of a pass is computed."""


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
        self._acceptance = Acceptance(config.memory, [part.name for part in self.parts if part.is_calibrated])
        self._plans = [PartPlan.of(part) for part in self.parts]
        self._credits = Credits(self.parts)
        self._row_trials = TrialSchedule()
        self._is_row_trial = False
        self._can_prune = True
        self._prefix = 0
        self._batch = 1
        self._others = self._other_rows = 0
        """Sequences of the round that others plan, and their rows."""
        self._asked: list[list[int]] = []
        self._conditions: list[list[DraftCondition | None]] = []
        self._scored: list[list[float]] | None = None
        self._round = 0
        self._next_decision = 0
        self._is_idle, self._planning = False, 0.0
        """`_planning`: seconds of `budgets` and `trim` in a round with a draft."""

    def learn_costs(self, pass_seconds: Mapping[int, float]) -> None:
        """Set the measured passes of the target."""
        super().learn_costs(pass_seconds)
        self._passes.learn(pass_seconds)

    def note_others(self, num_sequences: int, num_rows: int) -> None:
        """Count others' sequences in the costs of passes; they write one token each, as far as is known."""
        if num_sequences != self._others:
            self._next_decision = 0
        self._others, self._other_rows = num_sequences, num_rows

    def open(self) -> SequenceEstimates:
        """Estimates of a greedy sequence without an observation: it is planned by those of all others."""
        return self.open_for("")

    def open_for(self, draft: str, *, is_sampled: bool = False) -> SequenceEstimates:
        """Estimates without an observation, of a greedy or a sampled sequence."""
        self._next_decision = 0
        return SequenceEstimates(
            SequenceAcceptance(), tuple([plan.open(is_sampled=is_sampled) for plan in self._plans])
        )

    def budgets(self, states: Sequence[SequenceEstimates]) -> list[Budget]:
        """The depth of each drafter for every sequence."""
        batch = len(states)
        self._round += 1
        self._is_idle = self._round < self._next_decision and batch == self._batch
        if not self._limit or not batch or self._is_idle:
            return [NOTHING] * batch
        curve = self._curve(batch)
        self._scored, self._asked, self._is_row_trial = None, self._choose_depths(states, curve), False
        if not any(plan.depth for plan in self._plans):
            self._next_decision = self._round + min(AUTO.max_idle_rounds, *self._rounds_until_trials(states, curve))
        pairs = zip(zip(*self._asked, strict=True), zip(*self._conditions, strict=True), strict=True)
        return [budget_of(self._plans, depths, conditions, limit=self._limit) for depths, conditions in pairs]

    def _rounds_until_trials(self, states: Sequence[SequenceEstimates], curve: Sequence[float]) -> list[int]:
        batch, costly = len(states), self._costly(curve, len(states))
        owns = [[state.parts[index] for state in states] for index in range(len(self._plans))]
        return [
            plan.rounds_until_trial(
                own, curve, self._prices(plan, curve, batch), is_cheap=not is_costly, now=self._round
            )
            for plan, own, is_costly in zip(self._plans, owns, costly, strict=True)
        ]

    def _choose_depths(self, states: Sequence[SequenceEstimates], curve: Sequence[float]) -> list[list[int]]:
        """Levels by drafter and sequence: cheap drafters first, the others by what they add to these."""
        batch, costly = len(states), self._costly(curve, len(states))
        expected = Depth(0, float(batch + self._others), curve[batch])
        asked: list[list[int]] = [[0] * batch for _ in self._plans]
        self._conditions = [[None] * batch for _ in self._plans]
        order = sorted(range(len(costly)), key=lambda part: (costly[part], self.parts[part].runs_model))
        for index in order:
            plan, owns = self._plans[index], [state.parts[index] for state in states]
            if costly[index]:
                gains = plan.gains(owns, self._round)
                whole = [sum(column) for column in zip(*gains, strict=True)]
                unread = [
                    (state.length or self._prefix) - own.num_read for state, own in zip(states, owns, strict=True)
                ]
                best = plan.choose(
                    whole,
                    curve,
                    expected,
                    owns=owns,
                    catching_up=plan.costs.catching_up(unread),
                    planning=self._planning,
                    now=self._round,
                )
                asked[index] = plan.shares(gains, best.speed)
                if best.levels and not plan.is_trial:
                    least = (best.seconds - expected.seconds) * best.speed / batch
                    self._conditions[index] = conditions_of(index, self._plans, asked, gains, least, states)
                expected = best if best.levels else expected
            else:
                asked[index] = plan.choose_cheap(owns, self._prices(plan, curve, batch), now=self._round)
                if plan.depth and any(costly):  # these are judged by what it adds
                    drafted = [own for own, depth in zip(owns, asked[index], strict=True) if depth]
                    tokens = sum(map(sum, plan.gains(drafted, self._round)))
                    expected = Depth(plan.depth, expected.tokens + tokens, expected.seconds)
        return asked

    def _curve(self, batch: int) -> Sequence[float]:
        """Seconds of a pass by rows of this planner's own sequences."""
        others = self._others
        rows = min(others + batch * (1 + self._limit), MAX_ROWS)
        curve = self._passes.curve(others + batch, self._prefix, max_rows=rows)
        return curve[others:] if others else curve

    def _costly(self, curve: Sequence[float], batch: int) -> list[bool]:
        """Which drafters are judged before they draft: they cost time, or their trees must not be pruned."""
        return [not self._can_prune or not plan.is_cheap(curve[batch], batch) for plan in self._plans]

    def _prices(self, plan: PartPlan, curve: Sequence[float], batch: int) -> Prices:
        return plan.prices(curve[batch], batch + self._others, planning=self._planning)

    def trim(
        self, states: Sequence[SequenceEstimates], trees: Sequence[TokenTree], *, draft_seconds: float
    ) -> list[Sequence[int] | None]:
        """The nodes that are worth a row; the likeliest one at least where a trial is due."""
        survivals = [
            [self._ratio(state) * chance for chance in self._acceptance.survivals(state.acceptance, tree)]
            for state, tree in zip(states, trees, strict=True)
        ]
        batch, curve = len(states), self._curve(len(states))
        kept = list(choose_nodes(survivals, curve, sunk=draft_seconds, others=self._others).nodes)
        if any(kept):
            self._row_trials.restart()
        elif self._must_score(curve, batch):
            self._is_row_trial = True
            likeliest = max((row[0], index) for index, row in enumerate(survivals) if row)[1]
            kept[likeliest] = (0,)
        self._scored = [[row[node] for node in nodes] for row, nodes in zip(survivals, kept, strict=True)]
        return [None if len(nodes) == len(tree) else nodes for nodes, tree in zip(kept, trees, strict=True)]

    def _ratio(self, state: SequenceEstimates) -> float:
        """Accepted first tokens over expected ones; 1 for merged drafters, whose nodes have several sources."""
        return self._plans[0].levels_of(state.parts[0]).hit_ratio if len(self._plans) == 1 else 1.0

    def _must_score(self, curve: Sequence[float], batch: int) -> bool:
        """Whether a row is tried that is not expected to pay; without a verdict its estimate would stay as it is."""
        trials = [
            plan.is_trial for plan, is_costly in zip(self._plans, self._costly(curve, batch), strict=True) if is_costly
        ]
        row_cost = (curve[batch + 1] - curve[batch]) / curve[batch]
        return any(trials) or not self._row_trials.rounds_left(row_cost, self._round)

    def observe(self, states: Sequence[SequenceEstimates], record: RoundRecord) -> None:
        """Learn costs, acceptance and gains."""
        batch = len(states)
        firsts = [not state.length for state in states]
        for state, row in zip(states, record.sequences, strict=True):
            state.length = row.prefix_length + row.num_written
        if self._is_idle and self._round % AUTO.idle_sample_rounds:
            return
        self._batch, self._prefix = batch, sum(row.prefix_length for row in record.sequences) // max(1, batch)
        if batch and record.num_rows == self._other_rows + batch + sum(row.num_drafted for row in record.sequences):
            # rounds that read a prompt do not measure a pass
            self._passes.observe(
                record.num_rows,
                self._others + batch,
                self._prefix,
                seconds=record.total_seconds - record.draft_seconds,
                is_plain=self._is_idle or not any(map(any, self._asked)),
            )
        if self._is_idle or not any(plan.depth for plan in self._plans):
            return
        if any(len(row.drafted) for row in record.sequences):
            self._can_prune = self._scored is not None
        note_drafted(self._plans, self._credits, self._asked, self._conditions, states, record.sequences, firsts)
        self._observe_costs(states, record)
        self._observe_gains(states, record.sequences)
        for state, row in zip(states, record.sequences, strict=True):
            if row.bonus is not None and len(row.tree):
                self._acceptance.observe(state.acceptance, row.tree, row.path)

    def _observe_costs(self, states: Sequence[SequenceEstimates], record: RoundRecord) -> None:
        seconds = record.part_seconds or (record.draft_seconds,)
        self._planning += (record.plan_seconds - self._planning) / AUTO.cost_memory
        for index, plan in enumerate(self._plans):
            # without room for a draft, none was made
            places = [place for place in self._places(index) if record.sequences[place].room != 1]
            if places and index < len(seconds):
                rows = [record.sequences[place] for place in places]
                owns = [states[place].parts[index] for place in places]
                unread = [max(0, row.prefix_length - own.num_read) for row, own in zip(rows, owns, strict=True)]
                depth = max(states[place].drafted[index] for place in places)
                plan.observe_costs(seconds[index], depth, unread=unread)

    def _places(self, index: int) -> list[int]:
        """The sequences for which a drafter drafted."""
        return [place for place, depth in enumerate(self._asked[index]) if depth]

    def _observe_gains(self, states: Sequence[SequenceEstimates], rows: Sequence[SequenceRecord]) -> None:
        """Credit each drafter's levels with what their scored nodes were expected to add."""
        batch, curve = self._batch, self._curve(self._batch)
        costly = self._costly(curve, batch)
        pairs = zip(states, rows, strict=True)
        credits = [self._credits_of(place, state, row, costly) for place, (state, row) in enumerate(pairs)]
        if self._is_row_trial:
            self._row_trials.record(self._round, paid=False)
        for index, plan in enumerate(self._plans):
            places = self._places(index)
            if not places:
                continue
            own_credits = [credits[place][index] for place in places]
            hits = [self._credits.has_hit(index, rows[place].tree, rows[place].path) for place in places]
            owns = [states[place].parts[index] for place in places]
            plan.observe(self._round, owns, own_credits, hits)
            for place, own, credit in zip(places, owns, own_credits, strict=True):
                if credit.depth:
                    own.num_read = states[place].length
                if any(costly):  # otherwise no drafter is judged by it
                    own.levels.observe(self._round, [credit], plan.depth)
            prices = self._prices(plan, curve, batch)
            nets = net_gains(own_credits, curve, batch, token_seconds=prices.token)
            plan.observe_net_gains(owns, nets, prices, is_hit=any(hits), is_cheap=not costly[index], now=self._round)

    def _credits_of(
        self, place: int, state: SequenceEstimates, row: SequenceRecord, costly: Sequence[bool]
    ) -> list[Credit]:
        if self._scored is None:
            survivals = self._acceptance.survivals(state.acceptance, row.tree)
        else:
            survivals = self._scored[place]
        return self._credits.of(row.tree, survivals, costly=costly, drafted=row.drafted)

    def explain(self) -> str:
        """The costs and gains that the last budgets follow from."""
        curve = self._curve(self._batch)
        return sentence(self._plans, curve, self._batch, now=self._round)
