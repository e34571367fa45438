"""Requests from coroutines, with one listener for each sequence.

Updates go one way, from the engine's thread to the event loop of the client, and never block: a listener
buffers what is not read yet, at most one text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import final

from draftree.engine.engine import Update
from draftree.engine.sequence import Piece, WritingSequence


@final
class Listener:
    """News of one sequence on their way to a coroutine. `tell` is for the engine's thread, all else for the loop's.

    Args:
        sequence: whose news.
        loop: where the coroutine runs.
    """

    def __init__(self, sequence: WritingSequence, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence = sequence
        self.is_over = False
        """Whether the last news are here."""
        self._loop = loop
        self._arrived = asyncio.Event()
        self._pieces: list[Piece] = []

    def tell(self) -> bool:
        """Send what is new of the sequence; False if the loop is gone. After its end, once."""
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
        """All that is new since the last call; waits until something is."""
        await self._arrived.wait()
        self._arrived.clear()
        pieces, self._pieces = tuple(self._pieces), []
        return Update(self.sequence, pieces, is_last=self.is_over)


@final
class Request:
    """What one coroutine asked for.

    Args:
        sequences: all of one priority; no other request has them.
        loop: where the coroutine runs.
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
        """Whether the last news of all sequences are here; for the loop's thread."""
        return all(listener.is_over for listener in self.listeners)

    def refuse(self, error: Exception) -> None:
        """Fail the sequences of a request that is not in the engine, and notify their listeners."""
        for sequence in self.sequences:
            sequence.fail(error)
        for listener in self.listeners:
            listener.tell()
