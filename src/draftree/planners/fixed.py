"""The same number of tokens ahead in every round; `fixed:0` is plain decoding.

Without a number it is what the drafter asks for. The best number depends on the acceptance and on what a wider
pass costs here; measure, or take a planner that adapts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.core.types import Budget
from draftree.planners.base import Planner


@final
class FixedPlanner(Planner[None]):
    """Always k."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`fixed:K`: tokens ahead in every round; 0 is plain decoding."""

        k: int | None = field(default=None, metadata={"argument": True})

        def __post_init__(self) -> None:
            if self.k is not None and self.k < 0:
                raise ConfigurationError(f"planner 'fixed' has k={self.k}: it must be at least 0")

    def open(self) -> None:
        """Nothing to remember."""

    def budgets(self, states: Sequence[None]) -> list[Budget]:
        """K nodes, k levels."""
        k = self.default_depth if self.config.k is None else self.config.k
        return [self.ahead(k) for _ in states]
