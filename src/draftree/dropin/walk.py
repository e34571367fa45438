"""Walks the drafted trees of a batch in the order in which `generate` takes its steps, along the picks.

The rule is `coupled`: it goes down for as long as the pick is a child. It differs in when the logits become scores: at
a node only once the walk stands there, since the user's code must not be asked about texts that are never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.dropin.steps import Row, Steps
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import RandomSource, Verifier


@dataclass(slots=True, eq=False)
class _Walk:
    """Where the walk down one tree stands: at a node and its twins, which stand for the same text."""

    row: Row
    tree: TokenTree
    distributions: NodeDistributions
    nodes: list[int] = field(default_factory=lambda: [ROOT])
    depth: int = 0
    bonus: int | None = None

    @property
    def length(self) -> int:
        return self.row.num_pads + len(self.row.sequence.history) + self.depth

    def children(self, token: int) -> list[int]:
        here = set(self.nodes)
        pairs = enumerate(zip(self.tree.parents, self.tree.tokens, strict=True))
        return [node for node, (parent, other) in pairs if parent in here and other == token]


@final
class StepwiseVerifier(Verifier):
    """Keeps what `generate` would have written, step by step.

    Args:
        steps: what `generate` would hold.
        rows: the rows of the batch.
    """

    accepts: ClassVar[frozenset[Draw]] = frozenset(Draw)
    shares_noise: ClassVar[bool] = True

    def __init__(self, steps: Steps, rows: Sequence[Row]) -> None:
        super().__init__(None)
        self._steps = steps
        self._rows = {id(row.sequence.history): row for row in rows}

    def verify(self, tree: TokenTree, distributions: NodeDistributions, chance: RandomSource) -> Verdict:
        """One tree alone."""
        return self.verify_many([tree], [distributions], [chance])[0]

    def verify_many(
        self, trees: Sequence[TokenTree], distributions: Sequence[NodeDistributions], chances: Sequence[RandomSource]
    ) -> list[Verdict]:
        """All trees, the shortest texts first; side by side where rows are in step."""
        walks = [
            _Walk(self._rows[id(own.source.history)], tree, own) for tree, own in zip(trees, distributions, strict=True)
        ]
        while walking := [walk for walk in walks if walk.bonus is None]:
            length = min(walk.length for walk in walking)
            self._step([walk for walk in walking if walk.length == length], length)
        return [Verdict(tuple(walk.tree.path(walk.nodes[0])), _bonus(walk)) for walk in walks]

    def _step(self, walks: Sequence[_Walk], length: int) -> None:
        logits = torch.stack([walk.distributions.raw[walk.nodes[0] + 1] for walk in walks])
        picks, ends = self._steps.take([walk.row for walk in walks], length, logits)
        children = [walk.children(pick) for walk, pick in zip(walks, picks, strict=True)]
        halts = self._steps.in_step and any(
            not below and not ends_here for below, ends_here in zip(children, ends, strict=True)
        )
        for walk, pick, ends_here, below in zip(walks, picks, ends, children, strict=True):
            if ends_here:
                walk.row.sequence.end_at(length + 1 - walk.row.num_pads)
            if ends_here or halts or not below:
                walk.bonus = pick
            else:
                walk.nodes, walk.depth = below, walk.depth + 1


def _bonus(walk: _Walk) -> int:
    assert walk.bonus is not None, "a walk goes on until it ends"
    return walk.bonus
