"""Work of other kinds on the engine's thread, between its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from draftree.core.errors import EngineClosedError
from draftree.core.host import SYSTEM_CLOCK, Clock


class Background(ABC):
    """Work that shares the model and the thread of an engine. All methods are called on that thread.

    A step is short: it delays the next round of all sequences.
    """

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""

    @abstractmethod
    def step(self, *, is_alone: bool) -> None:
        """Do one part of the work. Its errors go to those who wait for it, and none is raised.

        Args:
            is_alone: whether the engine has no sequences, so that a long step delays none.
        """

    @abstractmethod
    def end(self, error: EngineClosedError) -> None:
        """Drop all work, and report the error to those who wait for it."""


@final
class TimeShare:
    """Division of a thread's time: background work gets at most as much time as rounds.

    The longest delay of a round is one step of the work. Time that the work does not use is not kept for later.

    Args:
        clock: measures rounds and work.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._start = 0.0
        self.ahead = 0.0
        """Seconds that the work has had more than the rounds since."""

    @property
    def may_work(self) -> bool:
        """Whether the work has its turn."""
        return self.ahead <= 0.0

    def begin(self) -> None:
        """Note the beginning of a round or of a step of the work."""
        self._start = self._clock()

    def end_round(self) -> None:
        """Note the end of a round."""
        self.ahead = max(0.0, self.ahead - (self._clock() - self._start))

    def end_work(self, *, is_alone: bool) -> None:
        """Note the end of a step of the work; it costs nothing if there were no rounds to delay."""
        self.ahead = 0.0 if is_alone else self.ahead + self._clock() - self._start
