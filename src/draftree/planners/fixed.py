"""Drafts the same number of tokens in every round; `fixed:0` is plain decoding.

The default is the drafter's depth. The best number depends on the acceptance and on the cost of more rows on this
machine; measure it, or use an adaptive planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.types import Budget
from draftree.planners.base import Planner, check_length


@final
class FixedPlanner(Planner[None]):
    """Planner with a constant draft length."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`fixed:K`: number of tokens per draft; 0 is plain decoding."""

        k: int | None = field(default=None, metadata={"argument": True, "limits": "depth"})

        def __post_init__(self) -> None:
            check_length("fixed", "k", self.k, least=0)

    def open(self, *, is_sampled: bool = False) -> None:
        """Return no state."""

    def budgets(self, states: Sequence[None]) -> list[Budget]:
        k = self.default_depth if self.config.k is None else self.config.k
        return [self.ahead(k) for _ in states]
