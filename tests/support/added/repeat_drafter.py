"""Drafts the last token again and again, on one branch beside the token before it.

An example of a drafter without state. Costs nothing. Loses unless tokens are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, SequenceView


@final
class RepeatDrafter(Drafter[SequenceView]):
    """Two branches at most."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`k`: length of the first branch."""

        k: int = 3

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        """Chosen children."""
        return DraftTraits(draws=frozenset({Draw.FREE}), depth=config.k, nodes=config.k + 1, branches=True)

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        """The last token `k` times, and the one before it."""
        tokens = state.history.tokens[-2:].tolist()
        depth = min(self._config.k, budget.num_nodes, budget.depth)
        chosen, parents = [tokens[-1]] * depth, list(range(ROOT, depth - 1))
        if depth < budget.num_nodes and len(tokens) == 2 and tokens[0] != tokens[1]:
            chosen, parents = [*chosen, tokens[0]], [*parents, ROOT]
        return TokenTree(tuple(chosen), tuple(parents))
