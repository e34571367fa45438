"""The plan seam: how much each sequence may draft in the next round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from draftree.core.registry import Registry
from draftree.core.types import Budget, RoundRecord

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


PLANNERS: Registry[Planner] = Registry("draftree.planners", "draftree.planners.base:Planner", kind="planner")  # type: ignore[type-arg]
