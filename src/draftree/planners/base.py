"""The plan seam: how much each sequence may draft in the next round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from draftree.core.errors import ConfigurationError
from draftree.core.types import Budget, RoundRecord
from draftree.planners import PLANNERS

__all__ = ["PLANNERS", "Length", "Planner", "adapt", "check_start"]

State = TypeVar("State")


class Planner(ABC, Generic[State]):
    """Decides budgets. Built as `cls(config, default_depth=…)`; what it knows of a sequence lies in the state.

    Args:
        config: the planner's own configuration.
        default_depth: the depth that the drafter asks for where the planner's configuration names none.
    """

    Config: ClassVar[type]

    def __init__(self, config: Any, *, default_depth: int) -> None:
        self.config = config
        self.default_depth = default_depth

    @abstractmethod
    def open(self) -> State:
        """State for a new sequence."""

    @abstractmethod
    def budgets(self, states: Sequence[State]) -> list[Budget]:
        """A budget for every sequence; the engine holds it to the room that is left."""

    def observe(self, states: Sequence[State], record: RoundRecord) -> None:
        """What came of the last budgets; `record.sequences` stands in the order of `states`."""


@dataclass(slots=True)
class Length:
    """A draft length that follows what was accepted. Mutated by `adapt`."""

    k: int


def adapt(states: Sequence[Length], record: RoundRecord, *, up: int, down: int) -> None:
    """Lengthen after full acceptance, shorten otherwise; rounds without a draft teach nothing."""
    for state, row in zip(states, record.sequences, strict=True):
        if row.num_drafted and row.num_in_path == row.draft_depth:
            # a drafter that had less to offer than it might was no test of this length
            state.k = max(state.k, min(state.k + up, row.draft_depth + up))
        elif row.num_drafted:
            state.k = max(1, state.k - down)


def check_start(planner: str, value: int | None) -> None:
    """Raise ConfigurationError unless the first length is absent or at least one."""
    if value is not None and value < 1:
        raise ConfigurationError(f"planner '{planner}' starts with {value} tokens: it must be at least 1")
