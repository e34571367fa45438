"""Tree of one sequence while it grows."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from torch import Tensor

from draftree.core.noise import Noise
from draftree.core.tree import ROOT
from draftree.core.types import Budget
from draftree.drafters.growing.stepper import Stepped


@dataclass(slots=True)
class GrowingTree:
    """Growing tree of one sequence. Scores are cumulative log-probabilities, the drafter's estimate of survival."""

    state: Stepped
    budget: Budget
    noise: Noise
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    ways: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    """Tokens on the path from the root to each node, for the root and every node."""
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    unsure: set[int] = field(default_factory=set)
    leaders: list[float] = field(default_factory=list)
    """Heap of the highest scores so far, as many as the budget has nodes."""

    def add(
        self, parent: int, token: int, score: float, *, confidence: float = 1.0, distribution: Tensor | None = None
    ) -> None:
        """Add a node with the logarithm of the probability that it is picked, given that its parent is."""
        if confidence < self.budget.min_confidence:
            # kept, because dropping a draw would bias the distribution, but without children
            self.unsure.add(len(self.tokens))
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score + self.score_of(parent))
        self.ways.append((*self.ways[parent + 1], token))
        if distribution is not None:
            self.distributions.append(distribution)
        if len(self.leaders) < self.budget.num_nodes:
            heapq.heappush(self.leaders, self.scores[-1])
        else:
            heapq.heappushpop(self.leaders, self.scores[-1])

    def score_of(self, node: int) -> float:
        """Return the cumulative score; 0 for the root."""
        return 0.0 if node == ROOT else self.scores[node]

    def may_lead(self, score: float) -> bool:
        """Return whether a new node with this score would be among the best; older ones win ties."""
        return len(self.leaders) < self.budget.num_nodes or score > self.leaders[0]

    def best(self, count: int) -> list[int]:
        """Return the nodes with the highest scores, which include their parents."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))
        return sorted(order[:count])
