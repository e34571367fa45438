"""Work of a server's host besides passes: its costs, and the interpreter that event loop and engine share. No torch.

A server is one process. Its event loop reads, checks and answers messages; the engine's thread prepares passes and
verifies their results. Only one of them holds the interpreter at a time, so messages delay passes and passes delay
messages. A pass itself does not hold it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

__all__ = ["Action", "Host", "HostCosts"]

Action = Callable[[float], None]
"""Called with the time at which a work has ended."""
DONE = 1e-10
"""Seconds of work that are too little to be left: rounding."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Time of the host besides passes. Seconds.

    Attributes:
        overhead: of the engine for every step.
        overhead_per_sequence: that each sequence adds to a step.
        draft_share: cost of drafting for a further sequence, as a share of drafting for it alone.
        overhead_per_tree: that the tree of a client adds to a step, besides its sequence: it is registered.
        overhead_per_row: that each row adds to a step: picks are computed and compared.
        after: share of the overheads of a step that follows the pass; the rest precedes it.
        opening: of the event loop for a text that a client opens.
        tree_message: of the event loop for a frame with a tree: receive, decode, check, and hand to the engine.
        verdict_message: of the event loop for the answer: encode and send.
        read_message: of the event loop for a frame that asks for tokens.
        tokens_message: of the event loop for the answer with tokens.
        update: of the event loop for new tokens of a text, whether or not a client asks for them now.
        wake_up: that the first message costs after a pause of the event loop.
    """

    overhead: float = 0.0
    overhead_per_sequence: float = 0.0
    draft_share: float = 0.0
    overhead_per_tree: float = 0.0
    overhead_per_row: float = 0.0
    after: float = 0.5
    opening: float = 0.0
    tree_message: float = 0.0
    verdict_message: float = 0.0
    read_message: float = 0.0
    tokens_message: float = 0.0
    update: float = 0.0
    wake_up: float = 0.0

    def step(self, sequences: int, *, trees: int = 0, rows: int = 0) -> float:
        """Return the seconds of the engine for a step besides its pass."""
        own = self.overhead + self.overhead_per_sequence * sequences
        return own + self.overhead_per_tree * trees + self.overhead_per_row * rows


@final
class Host:
    """The interpreter of a server, with two threads: messages in order of arrival, and one work of the engine.

    If both have work, each gets half of the time. Mutated by `Fleet` only.

    Args:
        wake_up: seconds that the first message after a pause costs besides its own.
    """

    def __init__(self, wake_up: float = 0.0) -> None:
        self._wake_up, self._now = wake_up, 0.0
        self._idle_since = -1.0
        """When the last message ended; what follows from it at once needs no waking."""
        self._messages = deque[tuple[float, Action]]()
        """Seconds that are left, and what follows."""
        self._engine: tuple[float, Action] | None = None

    def add(self, now: float, seconds: float, action: Action) -> None:
        """Queue the work of a message."""
        self._advance(now)
        is_awake = self._messages or now == self._idle_since
        self._messages.append((seconds if is_awake else seconds + self._wake_up, action))

    def begin(self, now: float, seconds: float, action: Action) -> None:
        """Begin a work of the engine, which has none."""
        self._advance(now)
        self._engine = (seconds, action)

    @property
    def next_end(self) -> float | None:
        """When the next work ends if nothing is added; None if there is none."""
        rate = 0.5 if self._messages and self._engine is not None else 1.0
        left = [self._messages[0][0]] if self._messages else []
        left += [] if self._engine is None else [self._engine[0]]
        return self._now + max(0.0, min(left)) / rate if left else None

    def take_ended(self, now: float) -> list[Action]:
        """Return what follows the works that have ended."""
        self._advance(now)
        found = list[Action]()
        while self._messages and self._messages[0][0] <= DONE:
            found.append(self._messages.popleft()[1])
            self._idle_since = now
        if self._engine is not None and self._engine[0] <= DONE:
            found.append(self._engine[1])
            self._engine = None
        return found

    def _advance(self, now: float) -> None:
        """Count the time since the last change. No work ends in between: its end is an event."""
        passed, self._now = now - self._now, now
        if self._messages and self._engine is not None:
            passed /= 2
        if self._messages:
            seconds, action = self._messages[0]
            self._messages[0] = (seconds - passed, action)
        if self._engine is not None:
            self._engine = (self._engine[0] - passed, self._engine[1])
