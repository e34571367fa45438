"""Two tokens more after a round in which all were accepted, one less otherwise; never under one.

Starts at `start`, or at what the drafter asks for.

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
    """Plus two, minus one."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`start`: tokens ahead in the first round."""

        start: int | None = field(default=None, metadata={"limits": "depth"})

        def __post_init__(self) -> None:
            check_length("heuristic", "start", self.start)

    def open(self) -> Length:
        """The length starts anew with every sequence."""
        return Length(self.default_depth if self.config.start is None else self.config.start)

    def budgets(self, states: Sequence[Length]) -> list[Budget]:
        """As long as the state says."""
        return [self.ahead(state.k) for state in states]

    def observe(self, states: Sequence[Length], record: RoundRecord) -> None:
        """Longer after full acceptance, else shorter."""
        adapt(states, record, up=2, down=1)
