"""Drafts in full and scores nothing: an instrument, with which a trace holds the draft at every position of a text.

Every round writes one token, as plain decoding does, and the record of the round holds the tree that was drafted there.
What any other planner would have done with it can then be simulated without a model. Trees of
draws from a distribution may not be cut: everything of them is scored all the same.

Source: ours. Costs the drafts, and brings nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from draftree.core.tree import TokenTree
from draftree.core.types import Budget
from draftree.planners.base import Planner


@final
class WatchPlanner(Planner[None]):
    """Looks at drafts, follows none."""

    wants_costs = True

    @dataclass(frozen=True, slots=True)
    class Config:
        """Takes no options."""

    def open(self) -> None:
        """Nothing to remember."""

    def budgets(self, states: Sequence[None]) -> list[Budget]:
        """All that the drafter gives."""
        return [self.ahead(self.default_depth) for _ in states]

    def trim(
        self, states: Sequence[None], trees: Sequence[TokenTree], *, draft_seconds: float
    ) -> list[Sequence[int] | None]:
        """Nothing of it."""
        return [()] * len(trees)
