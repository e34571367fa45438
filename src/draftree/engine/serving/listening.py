"""Requests of coroutines, with one listener for each sequence.

Updates are sent from the engine's thread to the event loop of the client, and never block: a listener
buffers unread updates, at most one text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import final

from draftree.engine.engine import Update
from draftree.engine.sequence import Piece, WritingSequence


@final
class Listener:
    """Channel for updates of one sequence to a coroutine. `tell` is for the engine's thread, the rest for the loop's.

    Args:
        sequence: the sequence.
        loop: event loop of the coroutine.
    """

    def __init__(self, sequence: WritingSequence, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence = sequence
        self.is_over = False
        """Whether the last update has arrived."""
        self._loop = loop
        self._arrived = asyncio.Event()
        self._pieces: list[Piece] = []

    def tell(self) -> bool:
        """Send new text and the end of the sequence; False if the loop is closed. After the end, once."""
        pieces, is_last = self.sequence.take_pieces(), self.sequence.is_finished
        if pieces or is_last:
            try:
                self._loop.call_soon_threadsafe(self._arrive, pieces, is_last)
            except RuntimeError:
                return False
        return True

    def _arrive(self, pieces: Sequence[Piece], is_last: bool) -> None:
        self._pieces.extend(pieces)
        self.is_over = is_last
        self._arrived.set()

    async def next(self) -> Update:
        """Return all updates since the last call; waits for one."""
        await self._arrived.wait()
        self._arrived.clear()
        pieces, self._pieces = tuple(self._pieces), []
        return Update(self.sequence, pieces, is_last=self.is_over)


@final
class Request:
    """The request of one coroutine.

    Args:
        sequences: its sequences, all of one priority; owned by this request.
        loop: event loop of the coroutine.
    """

    def __init__(self, sequences: Sequence[WritingSequence], loop: asyncio.AbstractEventLoop) -> None:
        self.sequences = tuple(sequences)
        self.listeners = tuple(Listener(sequence, loop) for sequence in sequences)

    @property
    def priority(self) -> int:
        """Lower numbers are served first."""
        return self.sequences[0].priority

    @property
    def is_over(self) -> bool:
        """Whether the last updates of all sequences have arrived; for the loop's thread."""
        return all(listener.is_over for listener in self.listeners)

    def refuse(self, error: Exception) -> None:
        """Fail the sequences of a request that is not in the engine, and notify their listeners."""
        for sequence in self.sequences:
            sequence.fail(error)
        for listener in self.listeners:
            listener.tell()
