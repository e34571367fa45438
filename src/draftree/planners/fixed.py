"""The same number of tokens ahead in every round; `fixed:0` is plain decoding.

Without a number it is what the drafter asks for. The best number depends on the acceptance and on what a wider
pass costs here; measure, or take a planner that adapts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.types import Budget
from draftree.planners.base import Planner, check_length


@final
class FixedPlanner(Planner[None]):
    """Always k."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`fixed:K`: tokens ahead in every round; 0 is plain decoding."""

        k: int | None = field(default=None, metadata={"argument": True, "limits": "depth"})

        def __post_init__(self) -> None:
            check_length("fixed", "k", self.k, least=0)

    def open(self) -> None:
        """Nothing to remember."""

    def budgets(self, states: Sequence[None]) -> list[Budget]:
        """K nodes, k levels."""
        k = self.default_depth if self.config.k is None else self.config.k
        return [self.ahead(k) for _ in states]
