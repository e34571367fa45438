"""Drafts as many nodes, as deep, as pay: expected tokens over expected seconds, from what was measured here.

How often the target's pick is the drafter's first, second, … child is learned from every round; the survival of a
node is the product along its path. What a pass of the target costs by its number of rows is measured before the
first round and refreshed by every round, what a level of the drafter costs is learned. Of all depths and sizes the
one with the most expected tokens a second is taken: a chain, a tree, or nothing. Nothing is tried again after
1, 2, 4, … rounds.

Source: goodput from measured cost, as SmartSpec, arXiv 2406.14066; best-first sizes, as OPT-Tree, arXiv 2406.17276,
with learned rank statistics in the place of the drafter's own probabilities. First version: one cost for all
prefixes, and a batch is planned as if each sequence were alone. Costs some tens of microseconds a round. Loses to a
fixed length where acceptance swings faster than it learns.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.types import Budget, RoundRecord
from draftree.planners.base import Planner

MAX_RANK = 8
PRIOR = (0.6, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)
"""How often the pick is the first, second, … child, before anything was seen."""
PRIOR_WEIGHT = 6.0
SIZES = (1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)
"""Trees that make, with their root, a pass of 2, 3, 4, 5, 6, 8, 12, 16, 24, … rows: processors multiply in blocks of 8,
16 or 32 rows, and one row more than a block costs as much as another block."""
MAX_PROBE_GAP = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """A budget that was weighed."""

    num_nodes: int
    depth: int
    expected_tokens: float
    expected_seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens a second."""
        return self.expected_tokens / self.expected_seconds


@final
class SurvivalPlanner(Planner[None]):
    """Weighs every size against plain decoding."""

    wants_costs = True

    @dataclass(frozen=True, slots=True)
    class Config:
        """`memory`: rounds after which what was learned counts 1/e; `nodes`: nodes at most."""

        memory: float = 60.0
        nodes: int | None = None

        def __post_init__(self) -> None:
            if self.memory < 1:
                raise ConfigurationError(f"planner 'survival' has memory={self.memory}: it must be at least 1")
            if self.nodes is not None and self.nodes < 1:
                raise ConfigurationError(f"planner 'survival' has nodes={self.nodes}: it must be at least 1")

    def __init__(self, config: Any, **draft: Any) -> None:
        super().__init__(config, **draft)
        self._limit = min(self.default_nodes, config.nodes or self.default_nodes)
        self._width = MAX_RANK if self.default_nodes > self.default_depth else 1
        self._hits = [PRIOR_WEIGHT * share for share in PRIOR]
        self._tries = [PRIOR_WEIGHT] * MAX_RANK
        self._pass_seconds: dict[int, float] = {}
        self._level_seconds: float | None = None
        self._choice: Choice | None = None
        self._idle, self._gap = 0, 1

    def learn_costs(self, pass_seconds: Mapping[int, float]) -> None:
        """Measured passes of the target."""
        self._pass_seconds = dict(pass_seconds)

    def open(self) -> None:
        """All is learned for all sequences together."""

    def budgets(self, states: Sequence[None]) -> list[Budget]:
        """The best size, or a probe after a while without drafts."""
        choice = self._best()
        if choice.num_nodes == 0:
            self._idle += 1
            if self._idle >= self._gap:
                self._idle, self._gap = 0, min(2 * self._gap, MAX_PROBE_GAP)
                probe = min(2, self.default_depth)
                return [Budget(min(self._limit, probe), probe) for _ in states]
        else:
            self._idle, self._gap = 0, 1
        self._choice = choice
        return [Budget(choice.num_nodes, choice.depth) for _ in states]

    def _best(self) -> Choice:
        plain = Choice(0, 0, 1.0, self._target_seconds(1))
        if not self._limit:
            return plain
        best = plain
        for depth in range(1, self.default_depth + 1):
            survival = self._survival(depth, self._limit)
            for size in sorted({min(s, len(survival)) for s in (*SIZES, depth) if s >= depth}):
                seconds = self._target_seconds(1 + size) + depth * (self._level_seconds or 0.0)
                choice = Choice(size, depth, 1.0 + sum(survival[:size]), seconds)
                if choice.speed > best.speed:
                    best = choice
        return best

    def _survival(self, depth: int, count: int) -> list[float]:
        """Survivals of the best `count` nodes of that depth at most, highest first."""
        rank = [hits / tries for hits, tries in zip(self._hits[: self._width], self._tries, strict=False)]
        # a node's next sibling and its first child are the only ones that it can bring into the race
        heap = [(-rank[0], 1, 1, 1.0)]
        found: list[float] = []
        while heap and len(found) < count:
            negative, level, place, parent = heapq.heappop(heap)
            found.append(-negative)
            if place < self._width:
                heapq.heappush(heap, (-parent * rank[place], level, place + 1, parent))
            if level < depth:
                heapq.heappush(heap, (negative * rank[0], level + 1, 1, -negative))
        return found

    def _target_seconds(self, rows: int) -> float:
        """Between two measured numbers of rows on a straight line, beyond the last in proportion."""
        known = sorted(self._pass_seconds)
        if not known:
            return 1.0 + 0.02 * (rows - 1)
        above = next((n for n in known if n >= rows), None)
        if above is None:
            return self._pass_seconds[known[-1]] * rows / known[-1]
        below = max((n for n in known if n <= rows), default=above)
        if below == above:
            return self._pass_seconds[above]
        share = (rows - below) / (above - below)
        return (1 - share) * self._pass_seconds[below] + share * self._pass_seconds[above]

    def observe(self, states: Sequence[None], record: RoundRecord) -> None:
        """Learn ranks and costs."""
        keep = 1.0 - 1.0 / self.config.memory
        for row in record.sequences:
            for num_children, kept in row.matches:
                for rank in range(min(num_children, MAX_RANK)):
                    self._tries[rank] = keep * self._tries[rank] + 1.0
                    self._hits[rank] = keep * self._hits[rank] + (1.0 if kept == rank + 1 else 0.0)
        depth = max((row.draft_depth for row in record.sequences), default=0)
        if depth:
            level = record.draft_seconds / depth
            self._level_seconds = level if self._level_seconds is None else 0.8 * self._level_seconds + 0.2 * level
        if len(record.sequences) == 1 and self._pass_seconds:
            old = self._target_seconds(record.num_rows)
            is_known = record.num_rows in self._pass_seconds
            # a prompt's first round is a longer pass of its own kind: it says nothing of this one
            if record.score_seconds < 3 * old and record.num_rows <= max(self._pass_seconds):
                share = 0.1 if is_known else 0.5
                self._pass_seconds[record.num_rows] = (1 - share) * old + share * record.score_seconds

    def explain(self) -> str:
        """The last choice beside plain decoding."""
        if self._choice is None:
            return "nothing planned yet"
        plain = 1.0 / self._target_seconds(1)
        first = self._hits[0] / self._tries[0]
        level = 1000 * (self._level_seconds or 0.0)
        facts = (
            f"the drafter's first guess is right {first:.0%} of the time, a level costs {level:.1f} ms, "
            f"a plain pass {1000 * self._target_seconds(1):.1f} ms"
        )
        if self._choice.num_nodes == 0:
            return f"off: {facts}; no draft is expected to beat {plain:.1f} tokens/s"
        kind = "chain" if self._choice.num_nodes == self._choice.depth else "tree"
        return (
            f"{kind} of {self._choice.num_nodes} nodes, {self._choice.depth} deep: {facts}; expected "
            f"{self._choice.speed:.1f} tokens/s against {plain:.1f} plain"
        )
