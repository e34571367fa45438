"""Rounds of the planner `adaptive` over drafters with a given acceptance. Not a test itself."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from draftree.core.node_map import merge, prune
from draftree.core.tree import EMPTY, TokenTree, depths
from draftree.core.types import Budget, DraftPart, RoundRecord, SequenceRecord
from draftree.planners.adaptive import AdaptivePlanner

FLAT = {1: 0.1, 4: 0.102, 8: 0.106, 16: 0.115, 32: 0.14, 64: 0.2}
STEEP = {rows: 0.1 * rows for rows in FLAT}


@dataclass
class Table:
    """A machine and a drafter.

    Attributes:
        costs: seconds of a pass by rows, straight between.
        right: chance that the pick is the first, second, … child, for each drafter.
        level: seconds of each drafter's level.
        unread: seconds for each token of the text that the drafter has not read, when it is to draft.
        read: tokens that it has read.
        length: tokens of the text.
        planning: seconds of the planner in a round.
        runs_model: whether the drafter runs a model.
        barren: drafts that are still empty, such as those of a lookup at the end of a prompt.
        rates: acceptance of each level that was measured before, for all drafters or those with a name.
        slow: numbers of the rounds whose drafts take fifty times as long.
        claims: acceptance of a level by the scores of the trees; None for trees without scores.
        after_draft: factor of a pass that follows a draft.
    """

    costs: dict[int, float]
    right: dict[str, tuple[float, ...]]
    level: dict[str, float]
    depth: int = 6
    batch: int = 1
    unread: float = 0.0
    read: int = 0
    length: int = 100
    planning: float = 0.0
    runs_model: bool = True
    barren: int = 0
    rates: tuple[float, ...] | dict[str, tuple[float, ...]] = ()
    slow: frozenset[int] = frozenset()
    claims: float | None = None
    after_draft: float = 1.0
    seconds: float = 0.0
    tokens: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    budgets: list[Budget] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = [
            DraftPart(
                name,
                self.depth,
                self.depth * len(right),
                runs_model=self.runs_model,
                is_calibrated=self.claims is not None,
                greedy_rates=self.rates.get(name, ()) if isinstance(self.rates, dict) else self.rates,
            )
            for name, right in self.right.items()
        ]
        nodes = sum(part.nodes for part in parts)
        config = AdaptivePlanner.Config()
        self.planner = AdaptivePlanner(config, default_depth=self.depth, default_nodes=nodes, parts=parts)
        self.planner.learn_costs(self.costs)
        self.states = [self.planner.open() for _ in range(self.batch)]

    def pass_seconds(self, rows: int) -> float:
        known = sorted(self.costs)
        low = max((n for n in known if n <= rows), default=known[0])
        high = min((n for n in known if n >= rows), default=known[-1])
        share = 0.0 if high == low else (rows - low) / (high - low)
        beyond = rows / known[-1] if rows > known[-1] else 1.0
        return beyond * ((1 - share) * self.costs[low] + share * self.costs[high])

    def play(self, rounds: int) -> Table:
        self.seconds, self.tokens, self.budgets, self.scored = 0.0, 0, [], []
        for _ in range(rounds):
            self.round()
        return self

    def round(self) -> None:
        budgets = self.planner.budgets(self.states)
        drafted = [self.draft(budget) for budget in budgets]
        reads = any(len(tree) for _, tree in drafted)
        catching_up = self.unread * (self.length - self.read) if reads else 0.0
        parts = tuple(
            catching_up
            + max(max(depths(own[name].parents), default=0) if name in own else 0 for own, _ in drafted)
            * self.level[name]
            * (50 if len(self.budgets) in self.slow else 1)
            for name in self.right
        )
        offered = [tree for _, tree in drafted]
        kept = [None] * self.batch
        if any(map(len, offered)):
            kept = self.planner.trim(self.states, offered, draft_seconds=sum(parts))
        trees = [t if k is None else prune(t, k) for t, k in zip(offered, kept, strict=True)]
        rows = [self.walk(*given) for given in zip(offered, trees, strict=True)]
        num_rows = self.batch + sum(map(len, trees))
        score = self.pass_seconds(num_rows) * (self.after_draft if any(map(len, offered)) else 1.0)
        total = score + sum(parts)
        part_seconds = parts if len(parts) > 1 else ()
        record = RoundRecord(self.planning, sum(parts), score, 0, 0, total, num_rows, tuple(rows), part_seconds)
        self.planner.observe(self.states, record)
        self.length += rows[0].num_written
        self.read = self.length if reads else self.read
        self.seconds += total
        self.tokens += sum(row.num_written for row in rows)
        self.budgets.append(budgets[0])
        self.scored.append(sum(map(len, trees)))

    def draft(self, budget: Budget) -> tuple[dict[str, TokenTree], TokenTree]:
        """Combs; the token encodes the index of the child, which determines whether it is right."""
        own: dict[str, TokenTree] = {}
        if budget.num_nodes and self.barren:
            self.barren -= 1
            return own, EMPTY
        for index, (name, right) in enumerate(self.right.items()):
            depth = budget.of_part(index).depth if budget.num_nodes else 0
            tokens, parents, spine = [], [], -1
            for _ in range(min(depth, self.depth)):
                first = len(tokens)
                tokens += [1000 * (index + 1) + rank for rank in range(len(right))]
                parents += [spine] * len(right)
                spine = first
                if self.claims is not None and self.claims ** (len(tokens) // len(right)) < budget.min_survival:
                    break
            scores = () if self.claims is None else self._scores(parents)
            if tokens:
                own[name] = TokenTree(tuple(tokens), tuple(parents), scores)
        if len(self.right) == 1:
            return own, next(iter(own.values()), EMPTY)
        return own, merge(list(own.values()), list(own)).tree if own else EMPTY

    def _scores(self, parents: list[int]) -> tuple[float, ...]:
        return tuple([level * math.log(self.claims or 1.0) for level in depths(parents)])

    def walk(self, offered: TokenTree, tree: TokenTree) -> SequenceRecord:
        path: list[int] = []
        place = -1
        children = tree.children()
        bonus = 1
        while True:
            hit, bonus = None, 1
            for index, right in enumerate(self.right.values()):
                luck = self.dice.random()
                for rank, share in enumerate(right):
                    luck -= share
                    if luck < 0:
                        bonus = 1000 * (index + 1) + rank
                        hit = next((c for c in children[place + 1] if tree.tokens[c] == bonus), hit)
                        break
            if hit is None:
                break
            path.append(hit)
            place = hit
        count = len(path)
        depth = max(depths(tree.parents), default=0)
        return SequenceRecord(
            "r",
            self.length,
            len(tree),
            depth,
            count,
            count + 1,
            count,
            drafted=offered,
            tree=tree,
            path=tuple(path),
            bonus=bonus,
        )

    def texts(self, count: int, rounds: int) -> list[float]:
        """The speed of texts one after the other, each of a prompt of 100 tokens and so many rounds."""
        found = []
        for _ in range(count):
            self.states, self.length, self.read = [self.planner.open() for _ in range(self.batch)], 100, 0
            found.append(self.play(rounds).speedup)
        return found

    @property
    def speedup(self) -> float:
        return self.tokens / self.seconds * self.pass_seconds(self.batch) / self.batch


def lone(costs: dict[int, float], *right: float, level: float, **more: float) -> Table:
    return Table(costs, {"d": right}, {"d": level}, **more)
