"""Work of a server's host besides passes: its costs, and the interpreter that event loop and engine share. No torch.

A server is one process. Its event loop reads, checks and answers messages; the engine's thread prepares passes and
verifies their results. Only one of them holds the interpreter at a time, so messages delay passes and passes delay
messages. A pass that is computed elsewhere does not hold it, except for its launch: what the host does for a pass while
it runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import final

__all__ = ["Action", "Host", "HostCosts"]

Action = Callable[[float], None]
"""Called with the time at which a work has ended."""
DONE = 1e-10
"""Seconds of work that are too little to be left: rounding."""
SHARES = ("draft_share", "after")
"""Costs that are no seconds."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Time of the host besides passes. Seconds.

    Attributes:
        overhead: of the engine for every step.
        overhead_per_sequence: that each sequence adds to a step.
        draft_share: cost of drafting for a further sequence, as a share of drafting for it alone.
        overhead_per_tree: that the tree of a client adds to a step, besides its sequence: it is registered.
        overhead_per_row: that each row adds to a step: picks are computed and compared.
        prompt_step: of the engine for every step that reads prompts, besides the others.
        launch: of the engine for every pass while it runs elsewhere; the pass ends no earlier than this work.
        launch_per_sequence: that each sequence adds to it.
        launch_per_row: that each row adds to it.
        after: share of the overheads of a step that follows the pass; the rest precedes it.
        opening: of the event loop for a text that a client opens, or of the engine to begin and end a text.
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
    prompt_step: float = 0.0
    launch: float = 0.0
    launch_per_sequence: float = 0.0
    launch_per_row: float = 0.0
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

    def launching(self, sequences: int, rows: int) -> float:
        """Return the seconds of the engine for a pass while it runs elsewhere."""
        return self.launch + self.launch_per_sequence * sequences + self.launch_per_row * rows

    def times(self, factor: float) -> HostCosts:
        """Return the costs of a host that takes so many times as long; shares stay."""
        seconds = {one.name: factor * getattr(self, one.name) for one in fields(self) if one.name not in SHARES}
        return replace(self, **seconds)


@final
class Host:
    """The interpreter of a server, with two threads: messages on the event loop, and one work of the engine.

    If both have work, each gets half of the time. The event loop gives all messages that it has the same time: it takes
    a part of each in turn, as each takes several of its iterations. So messages that come together end together.
    Mutated by `Fleet` only.

    Args:
        wake_up: seconds of the event loop before the first message after a pause.
    """

    def __init__(self, wake_up: float = 0.0) -> None:
        self._wake_up, self._now = wake_up, 0.0
        self._waking = 0.0
        """Seconds that are left before messages."""
        self._idle_since = -1.0
        """When the last message ended; what follows from it at once needs no waking."""
        self._given = 0.0
        """Seconds that every message has been given."""
        self._messages: list[tuple[float, int, Action]] = []
        """Heap: value of `_given` at which a message ends, its number, and what follows."""
        self._numbers = itertools.count()
        self._engine: tuple[float, Action] | None = None

    def add(self, now: float, seconds: float, action: Action) -> None:
        """Add the work of a message."""
        self._advance(now)
        if not self._messages and now != self._idle_since:
            self._waking = self._wake_up
        heapq.heappush(self._messages, (self._given + seconds, next(self._numbers), action))

    def begin(self, now: float, seconds: float, action: Action) -> None:
        """Begin a work of the engine, which has none."""
        self._advance(now)
        self._engine = (seconds, action)

    @property
    def next_end(self) -> float | None:
        """When the next work ends if nothing is added; None if there is none."""
        rate = 0.5 if self._messages and self._engine is not None else 1.0
        left = [] if self._engine is None else [self._engine[0]]
        if self._messages:
            left.append(self._waking + len(self._messages) * max(0.0, self._messages[0][0] - self._given))
        return self._now + max(0.0, min(left)) / rate if left else None

    def take_ended(self, now: float) -> list[Action]:
        """Return what follows the works that have ended."""
        self._advance(now)
        found = list[Action]()
        while self._messages and self._messages[0][0] - self._given <= DONE:
            found.append(heapq.heappop(self._messages)[2])
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
        if self._engine is not None:
            self._engine = (self._engine[0] - passed, self._engine[1])
        if self._messages:
            woken = min(passed, self._waking)
            self._waking -= woken
            self._given += (passed - woken) / len(self._messages)
