"""Drafts one token more after full acceptance, one less otherwise; at least one.

Starts at `start`, or at the drafter's depth. Grows more slowly than `heuristic`: steadier at medium acceptance, slower
where long runs are copied.

Source: additive increase, additive decrease of the draft length, as in overviews of assisted generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.types import Budget, RoundRecord
from draftree.planners.base import Length, Planner, adapt, check_length


@final
class AdditivePlanner(Planner[Length]):
    """Planner that changes the draft length by plus one or minus one."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`start`: number of tokens in the first draft."""

        start: int | None = field(default=None, metadata={"limits": "depth"})

        def __post_init__(self) -> None:
            check_length("additive", "start", self.start)

    def open(self, *, is_sampled: bool = False) -> Length:
        """Return the initial length."""
        return Length(self.default_depth if self.config.start is None else self.config.start)

    def budgets(self, states: Sequence[Length]) -> list[Budget]:
        """Return budgets of the current lengths."""
        return [self.ahead(state.k) for state in states]

    def observe(self, states: Sequence[Length], record: RoundRecord) -> None:
        """Increase a length after full acceptance, decrease it otherwise."""
        adapt(states, record, up=1, down=1)
