"""Drafts one token more after full acceptance, one less otherwise; at least one.

Starts at `start`, or at the drafter's depth. Grows more slowly than `heuristic`: steadier at medium acceptance, slower
where long runs are copied.

Source: additive increase, additive decrease of the draft length, as in overviews of assisted generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from draftree.planners.base import LengthPlanner, check_length


@final
class AdditivePlanner(LengthPlanner):
    """Planner that changes the draft length by plus one or minus one."""

    growth = 1

    @dataclass(frozen=True, slots=True)
    class Config:
        """`start`: number of tokens in the first draft."""

        start: int | None = field(default=None, metadata={"limits": "depth"})

        def __post_init__(self) -> None:
            check_length("additive", "start", self.start)
