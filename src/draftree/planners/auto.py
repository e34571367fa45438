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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import TokenTree
from draftree.core.types import Budget, RoundRecord, SequenceRecord
from draftree.planners.acceptance import Acceptance, OwnAcceptance
from draftree.planners.base import Planner
from draftree.planners.choosing import choose_depth, choose_nodes
from draftree.planners.costs import PassCosts
from draftree.planners.credit import Credits
from draftree.planners.drafting import Levels, OwnLevels, PartPlan, Rest
from draftree.planners.reasons import sentence

MAX_ROWS = 1024
ON_AGAIN = 1.02
"""How many times as fast as without it a drafter that is off must be expected to be."""
CAUGHT_UP = 16
"""Tokens behind the text from which a draft is no measure of what a level costs."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one sequence: shifts of its chances, and what each drafter brought."""

    acceptance: OwnAcceptance
    parts: tuple[OwnLevels, ...]


@final
class AutoPlanner(Planner[Known]):
    """Weighs every node and every level against plain decoding."""

    wants_costs = True

    @dataclass(frozen=True, slots=True)
    class Config:
        """`memory`: guesses of a kind after which what was learned counts 1/e; `nodes`: nodes of a sequence at most."""

        memory: float = 80.0
        nodes: int | None = None

        def __post_init__(self) -> None:
            if self.memory < 1:
                raise ConfigurationError(f"planner 'auto' has memory={self.memory}: it must be at least 1")
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
            return [Budget(0, 0)] * batch
        curve = self._curve(batch)
        tokens, seconds = float(batch), curve[batch]
        asked: list[list[int]] = [[0] * batch for _ in self._plans]
        for index in sorted(range(len(self._plans)), key=self._is_dear):
            plan = self._plans[index]
            gains = plan.gains([state.parts[index] for state in states])
            levels = plan.level_seconds(curve, batch)
            whole = [sum(column) for column in zip(*gains, strict=True)]
            if self._is_dear(index):
                best = choose_depth(whole, levels, tokens=tokens, seconds=seconds, bias=1.0 if plan.depth else ON_AGAIN)
                plan.decide(best.levels, curve, batch)
                asked[index] = self._shares(plan, gains, best.speed)
                tokens, seconds = (best.tokens, best.seconds) if best.levels else (tokens, seconds)
            else:
                plan.decide_instant(curve, batch)
                asked[index] = [plan.depth] * batch
                tokens += sum(whole) if plan.depth else 0.0
        self._scored, self._asked, self._worthy = None, asked, set(range(batch))
        return [self._budget(depths) for depths in zip(*asked, strict=True)]

    def _curve(self, batch: int) -> Sequence[float]:
        rows = min(batch * (1 + self._limit), MAX_ROWS)
        return self._passes.curve(batch, self._prefix, max_rows=rows)

    def _is_dear(self, index: int) -> bool:
        """Whether a drafter is to be judged before it drafts: it costs time, or its trees may not be cut."""
        return not self._cuts or not self._plans[index].costs.is_instant(
            self._passes.curve(1, self._prefix, max_rows=1)[1]
        )

    @staticmethod
    def _shares(plan: PartPlan, gains: Sequence[Sequence[float]], speed: float) -> list[int]:
        """Of a level's cost half is shared by the batch; a sequence that does not bring its own half is left out."""
        batch = len(gains)
        least = (
            speed * plan.costs.of(plan.depth, otherwise=0.0) / (2 * batch) if batch > 1 and not plan.is_probe else 0.0
        )
        return [plan.depth if sum(own[: plan.depth]) >= least else 0 for own in gains]

    def _budget(self, asked: tuple[int, ...]) -> Budget:
        asked = tuple(min(levels, self._limit) for levels in asked)
        depth = max(asked)
        return Budget(self._limit if depth else 0, depth, part_depths=asked if len(asked) > 1 else ())

    def trim(
        self, states: Sequence[Known], trees: Sequence[TokenTree], *, draft_seconds: float
    ) -> list[Sequence[int] | None]:
        """The nodes that are worth a row; of a drafter that is tried again at least its surest guess."""
        survivals = [self._acceptance.survivals(s.acceptance, t) for s, t in zip(states, trees, strict=True)]
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
        self._batch, self._prefix = batch, sum(row.prefix_length for row in record.sequences) // max(1, batch)
        if batch and record.num_rows == batch + sum(row.num_drafted for row in record.sequences):
            # rounds that read a prompt are no measure
            self._passes.observe(
                record.num_rows, batch, self._prefix, seconds=record.total_seconds - record.draft_seconds
            )
        if any(len(row.offered) for row in record.sequences):
            self._cuts = self._scored is not None
        self._observe_costs(states, record)
        for plan in self._plans:
            plan.fruitless += 1 if plan.depth else 0
        for place, (state, row) in enumerate(zip(states, record.sequences, strict=True)):
            if any(plan.depth for plan in self._plans):
                self._observe_gains(state, row, place)
            else:
                self._observe_silence(state, row)
            if row.bonus is not None and len(row.tree):
                self._acceptance.observe(state.acceptance, row.tree, row.path)

    def _observe_costs(self, states: Sequence[Known], record: RoundRecord) -> None:
        seconds = record.part_seconds or (record.draft_seconds,)
        offered = [row.offered for row in record.sequences]
        for index, plan in enumerate(self._plans):
            asked = [place for place, depth in enumerate(self._asked[index]) if depth] if plan.depth else []
            if asked and index < len(seconds):
                is_first = any(states[place].parts[index].behind > CAUGHT_UP for place in asked)
                depth = max(self._credits.depth_of(index, offered[place]) for place in asked)
                plan.costs.observe(seconds[index], depth, is_first=is_first)

    def _observe_gains(self, state: Known, row: SequenceRecord, place: int) -> None:
        """A level's gain is what its scored nodes were expected to bring."""
        if self._scored is None:
            survivals = self._acceptance.survivals(state.acceptance, row.tree)
        else:
            survivals = self._scored[place]
        batch, curve = self._batch, self._curve(self._batch)
        credits = self._credits.of(row.tree, survivals, is_dear=self._is_dear)
        for index, (plan, own, credit) in enumerate(zip(self._plans, state.parts, credits, strict=True)):
            depth = self._asked[index][place] if plan.depth else 0
            own.levels.observe(credit.gains, credit.rows, depth)
            plan.levels.observe(credit.gains, credit.rows, depth)
            own.behind = 0 if depth else own.behind + row.num_written
            if depth and place in self._worthy and plan.has_paid(credit, curve, batch):
                plan.wake()

    def _observe_silence(self, state: Known, row: SequenceRecord) -> None:
        for plan, own in zip(self._plans, state.parts, strict=True):
            own.levels.observe((), (), 0)
            plan.levels.observe((), (), 0)
            own.behind += row.num_written

    def explain(self) -> str:
        """Why the last budgets are as they are."""
        return sentence(
            self._plans, self._passes.curve(self._batch, self._prefix, max_rows=2 * self._batch), self._batch
        )
