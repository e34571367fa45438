"""Drafts what pays: learned survival of every node against measured seconds of passes and drafts, or nothing.

A drafter whose calls cost next to nothing drafts first, and its tree is cut then: over the whole batch the nodes of the
highest survival are scored, as many as raise expected tokens over expected seconds. One that steps a model is asked for
as many levels as pay by what its levels brought before, or for none; merged drafters each by themselves. What does not
pay is tried again at growing intervals, held to a few thousandths of the time.

Source: goodput from measured cost, as SmartSpec, arXiv 2406.14066; best-first sizes, as OPT-Tree, arXiv 2406.17276,
with calibrated chances in the place of the drafter's own. Costs a few passes before the first round and some tens of
microseconds a round. Loses to the best fixed length where acceptance swings faster than it learns. Plans follow the
clock, and under a rule whose text depends on the draft the text does, too; there, and for a drafter that works ahead,
`fixed` is the default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import TokenTree
from draftree.core.types import Budget, RoundRecord, SequenceRecord
from draftree.planners.base import Planner
from draftree.planners.estimates.acceptance import Acceptance, OwnAcceptance
from draftree.planners.estimates.choosing import choose_depth, choose_nodes
from draftree.planners.estimates.costs import PassCosts
from draftree.planners.estimates.credit import Credit, Credits
from draftree.planners.estimates.drafting import SOON, Levels, OwnLevels, PartPlan, Rest
from draftree.planners.estimates.reasons import sentence

NOTHING = Budget(0, 0)
MAX_ROWS = 1024
ON, ON_AGAIN = 1.01, 1.03
"""How many times as fast as without it a dear drafter must be expected to be, and one that is off."""
NAP = 16
"""Rounds at most in which nothing is weighed, because nothing is drafted and no try is due."""
SAMPLED = 4
"""Every so many of these rounds one teaches what a pass takes."""


@dataclass(slots=True)
class Known:
    """What is known of one sequence: shifts of its chances, and what each drafter brought. Mutated every round."""

    acceptance: OwnAcceptance
    parts: tuple[OwnLevels, ...]
    length: int = 0
    """Tokens of the text, as of the last round."""


@final
class AutoPlanner(Planner[Known]):
    """Weighs every node and every level against plain decoding."""

    wants_costs = True

    @dataclass(frozen=True, slots=True)
    class Config:
        """`memory`: guesses of a kind after which what was learned counts 1/e; `nodes`: nodes of a sequence at most."""

        memory: float = 80.0
        nodes: int | None = field(default=None, metadata={"limits": "nodes"})

        def __post_init__(self) -> None:
            if not 1 <= self.memory < math.inf:
                raise ConfigurationError(f"planner 'auto' has memory={self.memory}: it must be a number of at least 1")
            if self.nodes is not None and self.nodes < 1:
                raise ConfigurationError(f"planner 'auto' has nodes={self.nodes}: it must be at least 1")

    def __init__(self, config: Any, **draft: Any) -> None:
        super().__init__(config, **draft)
        self._limit = min(self.default_nodes, config.nodes or self.default_nodes)
        self._passes = PassCosts()
        self._acceptance = Acceptance(config.memory)
        self._plans = [PartPlan.of(part) for part in self.parts]
        self._credits = Credits(self.parts)
        self._cuts = True
        self._prefix = 0
        self._batch = 1
        self._asked: list[list[int]] = []
        self._scored: list[list[float]] | None = None
        self._worthy: set[int] = set()
        self._blind = Rest()
        self._nap = self._slept = 0
        """Rounds in which nothing is weighed: those to come, and those since something was."""

    def learn_costs(self, pass_seconds: Mapping[int, float]) -> None:
        """Measured passes of the target."""
        super().learn_costs(pass_seconds)
        self._passes.learn(pass_seconds)

    def open(self) -> Known:
        """Nothing of its own yet: it is planned as all others were."""
        return Known(OwnAcceptance(), tuple(OwnLevels(Levels.of_depth(part.depth)) for part in self.parts))

    def budgets(self, states: Sequence[Known]) -> list[Budget]:
        """How deep each drafter goes, for every sequence."""
        batch = len(states)
        if not self._limit or not batch:
            return [NOTHING] * batch
        if self._nap and batch == self._batch:
            self._nap -= 1
            self._slept += 1
            return [NOTHING] * batch
        curve, rounds = self._curve(batch), 1 + self._slept
        self._wake(states)
        tokens, seconds = float(batch), curve[batch]
        asked: list[list[int]] = [[0] * batch for _ in self._plans]
        dear = self._dear()
        for index in sorted(range(len(dear)), key=dear.__getitem__):
            plan, owns = self._plans[index], [state.parts[index] for state in states]
            if not dear[index]:
                plan.decide_instant(curve, batch, rounds=rounds)
                asked[index] = [plan.depth] * batch
                if plan.depth and any(dear):  # those are weighed by what it brings
                    tokens += sum(map(sum, plan.gains(owns)))
                continue
            gains = plan.gains(owns)
            whole = [sum(column) for column in zip(*gains, strict=True)]
            catching_up = plan.costs.catching_up(self._behind(states, index))
            levels = plan.level_seconds(curve, batch)
            levels[0] += catching_up / SOON
            bias = ON if plan.depth else ON_AGAIN
            best = choose_depth(whole, levels, tokens=tokens, seconds=seconds, bias=bias)
            plan.decide(best.levels, curve, batch, catching_up=catching_up, rounds=rounds)
            asked[index] = self._shares(plan, gains, best.speed)
            tokens, seconds = (best.tokens, best.seconds) if best.levels else (tokens, seconds)
        self._scored, self._asked, self._worthy = None, asked, set(range(batch))
        if not any(plan.depth for plan in self._plans):
            self._nap = min([NAP, *(plan.rest.left(curve[batch], plan.try_seconds) - 1 for plan in self._plans)])
            self._nap = max(0, self._nap)
        return [self._budget(depths) for depths in zip(*asked, strict=True)]

    def _wake(self, states: Sequence[Known]) -> None:
        """What was not tried in the rounds that were slept through is believed less."""
        if self._slept:
            self._fade(states, self._slept)
        self._nap = self._slept = 0

    def _fade(self, states: Sequence[Known], rounds: int) -> None:
        for levels in (*(p.levels for p in self._plans), *(own.levels for state in states for own in state.parts)):
            levels.fade(rounds)

    def _behind(self, states: Sequence[Known], index: int) -> list[int]:
        """Tokens of each text that a drafter has not read; of a new text as many as others have."""
        return [(state.length or self._prefix) - state.parts[index].read for state in states]

    def _curve(self, batch: int) -> Sequence[float]:
        rows = min(batch * (1 + self._limit), MAX_ROWS)
        return self._passes.curve(batch, self._prefix, max_rows=rows)

    def _dear(self) -> list[bool]:
        """Which drafters are to be judged before they draft: they cost time, or their trees may not be cut."""
        plain_seconds = self._passes.curve(1, self._prefix, max_rows=1)[1]
        return [not self._cuts or not plan.is_instant(plain_seconds) for plan in self._plans]

    @staticmethod
    def _shares(plan: PartPlan, gains: Sequence[Sequence[float]], speed: float) -> list[int]:
        """Of a level's cost half is shared by the batch; a sequence that does not bring its own half is left out."""
        batch = len(gains)
        least = speed * plan.costs.of(plan.depth) / (2 * batch) if batch > 1 and not plan.is_probe else 0.0
        return [plan.depth if sum(own[: plan.depth]) >= least else 0 for own in gains]

    def _budget(self, asked: tuple[int, ...]) -> Budget:
        asked = tuple(min(levels, self._limit) for levels in asked)
        depth = max(asked)
        return Budget(self._limit if depth else 0, depth, part_depths=asked if len(asked) > 1 else ())

    def trim(
        self, states: Sequence[Known], trees: Sequence[TokenTree], *, draft_seconds: float
    ) -> list[Sequence[int] | None]:
        """The nodes that are worth a row; of a drafter that is tried again at least its surest guess."""
        luck = self._plans[0].luck if len(self._plans) == 1 else 1.0
        survivals = [
            [luck * chance for chance in self._acceptance.survivals(state.acceptance, tree)]
            for state, tree in zip(states, trees, strict=True)
        ]
        batch, curve = len(states), self._curve(len(states))
        chosen = choose_nodes(survivals, curve, sunk=draft_seconds)
        kept = list(chosen.nodes)
        self._worthy = {place for place, nodes in enumerate(kept) if nodes}
        if self._worthy:
            self._blind.end()
        elif any(p.is_probe for p in self._plans) or not self._blind.goes_on(
            curve[batch], curve[batch + 1] - curve[batch]
        ):
            # what is never scored is never known better
            surest = max((row[0], index) for index, row in enumerate(survivals) if row)[1]
            kept[surest] = (0,)
        self._scored = [[row[node] for node in nodes] for row, nodes in zip(survivals, kept, strict=True)]
        return [None if len(nodes) == len(tree) else nodes for nodes, tree in zip(kept, trees, strict=True)]

    def observe(self, states: Sequence[Known], record: RoundRecord) -> None:
        """Learn costs, chances and gains."""
        batch = len(states)
        for state, row in zip(states, record.sequences, strict=True):
            state.length = row.prefix_length + row.num_written
        if self._slept % SAMPLED:
            return
        self._batch, self._prefix = batch, sum(row.prefix_length for row in record.sequences) // max(1, batch)
        if batch and record.num_rows == batch + sum(row.num_drafted for row in record.sequences):
            # rounds that read a prompt are no measure
            self._passes.observe(
                record.num_rows, batch, self._prefix, seconds=record.total_seconds - record.draft_seconds
            )
        if self._slept:
            return
        if any(len(row.drafted) for row in record.sequences):
            self._cuts = self._scored is not None
        self._observe_costs(states, record)
        for plan in self._plans:
            plan.fruitless += 1 if plan.depth else 0
        if any(plan.depth for plan in self._plans):
            self._observe_gains(states, record.sequences)
        else:
            self._fade(states, 1)
        for state, row in zip(states, record.sequences, strict=True):
            if row.bonus is not None and len(row.tree):
                self._acceptance.observe(state.acceptance, row.tree, row.path)

    def _observe_costs(self, states: Sequence[Known], record: RoundRecord) -> None:
        seconds = record.part_seconds or (record.draft_seconds,)
        for index, plan in enumerate(self._plans):
            asked = [place for place, depth in enumerate(self._asked[index]) if depth] if plan.depth else []
            if asked and index < len(seconds):
                rows = [record.sequences[place] for place in asked]
                owns = [states[place].parts[index] for place in asked]
                behind = sum(max(0, row.prefix_length - own.read) for row, own in zip(rows, owns, strict=True))
                depth = max(self._credits.depth_of(index, row.drafted) for row in rows)
                plan.costs.observe(seconds[index], depth, behind=behind)

    def _observe_gains(self, states: Sequence[Known], rows: Sequence[SequenceRecord]) -> None:
        """A level's gain is what its scored nodes were expected to bring."""
        batch, curve, dear = self._batch, self._curve(self._batch), self._dear()
        pairs = zip(states, rows, strict=True)
        credits = [self._credits_of(place, state, row, dear) for place, (state, row) in enumerate(pairs)]
        for index, plan in enumerate(self._plans):
            depths = self._asked[index] if plan.depth else [0] * batch
            asked = [place for place, depth in enumerate(depths) if depth]
            hits = sum(self._credits.has_hit(index, rows[place].tree, rows[place].path) for place in asked)
            plan.learn([credits[place][index] for place in asked], hits)
            for place, (state, row, depth) in enumerate(zip(states, rows, depths, strict=True)):
                own, credit = state.parts[index], credits[place][index]
                if any(dear):  # else no part is weighed by it
                    own.levels.observe(credit.gains, credit.rows, depth)
                own.read = state.length if depth else own.read
                if depth and place in self._worthy and plan.has_paid(credit, curve, batch):
                    plan.wake()
                elif depth and plan.is_probe and self._credits.has_hit(index, row.tree, row.path):
                    plan.rest.again(curve[batch], plan.repeat_seconds)

    def _credits_of(self, place: int, state: Known, row: SequenceRecord, dear: Sequence[bool]) -> list[Credit]:
        if self._scored is None:
            survivals = self._acceptance.survivals(state.acceptance, row.tree)
        else:
            survivals = self._scored[place]
        return self._credits.of(row.tree, survivals, dear=dear)

    def explain(self) -> str:
        """Why the last budgets are as they are."""
        return sentence(
            self._plans, self._passes.curve(self._batch, self._prefix, max_rows=2 * self._batch), self._batch
        )
