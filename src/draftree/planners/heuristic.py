"""Drafts two tokens more after full acceptance, one less otherwise; at least one.

Starts at `start`, or at the drafter's depth.

Source: the draft length schedule of assisted generation in transformers (`num_assistant_tokens_schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.types import Budget, RoundRecord
from draftree.planners.base import Length, Planner, adapt, check_length


@final
class HeuristicPlanner(Planner[Length]):
    """Planner that changes the draft length by plus two or minus one."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`start`: number of tokens in the first draft."""

        start: int | None = field(default=None, metadata={"limits": "depth"})

        def __post_init__(self) -> None:
            check_length("heuristic", "start", self.start)

    def open(self, *, is_sampled: bool = False) -> Length:
        """Return the initial length."""
        return Length(self.default_depth if self.config.start is None else self.config.start)

    def budgets(self, states: Sequence[Length]) -> list[Budget]:
        """Return budgets of the current lengths."""
        return [self.ahead(state.k) for state in states]

    def observe(self, states: Sequence[Length], record: RoundRecord) -> None:
        """Increase a length after full acceptance, decrease it otherwise."""
        adapt(states, record, up=2, down=1)
