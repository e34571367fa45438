"""Drafts in full and scores nothing, for traces with the draft at every position of a text.

Every round writes one token, as in plain decoding, and its record has the drafted tree. Other planners can then be
simulated on the trace without a model. Trees of draws from a distribution must not be cut, so they are scored.

Source: ours. Costs the drafts, without any gain.
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
    """Planner that discards all drafts."""

    wants_costs = True

    @dataclass(frozen=True, slots=True)
    class Config:
        """No options."""

    def open(self, *, is_sampled: bool = False) -> None:
        """Return no state."""

    def budgets(self, states: Sequence[None]) -> list[Budget]:
        return [self.ahead(self.default_depth) for _ in states]

    def trim(
        self, states: Sequence[None], trees: Sequence[TokenTree], *, draft_seconds: float
    ) -> list[Sequence[int] | None]:
        """Return no nodes of any tree."""
        return [()] * len(trees)
