"""Drafts two tokens more after full acceptance, one less otherwise; at least one.

Starts at `start`, or at the drafter's depth.

Source: the draft length schedule of assisted generation in transformers (`num_assistant_tokens_schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from draftree.planners.base import LengthPlanner, check_length


@final
class HeuristicPlanner(LengthPlanner):
    """Planner that changes the draft length by plus two or minus one."""

    growth = 2

    @dataclass(frozen=True, slots=True)
    class Config:
        """`start`: number of tokens in the first draft."""

        start: int | None = field(default=None, metadata={"limits": "depth"})

        def __post_init__(self) -> None:
            check_length("heuristic", "start", self.start)
