"""Requests of coroutines, and the channel for their updates.

Updates are sent from the engine's thread to the event loop of the client, and never block: a request buffers unread
updates, at most one text of each sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import final

from draftree.engine.sequence import Update, WritingSequence


@final
class Request:
    """The request of one coroutine. `deliver`, `accept` and `refuse` send; all else is for the loop's thread.

    Args:
        sequences: its sequences, all of one priority; owned by this request.
        loop: event loop of the coroutine.
    """

    def __init__(self, sequences: Sequence[WritingSequence], loop: asyncio.AbstractEventLoop) -> None:
        self.sequences = tuple(sequences)
        self.untold = list(sequences)
        """Sequences whose last update has not been sent; for the thread that sends."""
        self._loop = loop
        self._unread: dict[int, list[Update]] = {}
        self._num_open = len(self.sequences)
        self._has_answer, self._has_update = asyncio.Event(), asyncio.Event()
        self._refusal: Exception | None = None
        self._failure: Exception | None = None

    @property
    def priority(self) -> int:
        """Lower numbers are served first."""
        return self.sequences[0].priority

    @property
    def is_over(self) -> bool:
        """Whether the request was refused or ended, or the last updates of all sequences have arrived."""
        return self._refusal is not None or self._failure is not None or not self._num_open

    def accept(self) -> None:
        """Notify the coroutine that the sequences are in the engine."""
        self._send(None)

    def refuse(self, error: Exception) -> None:
        """Fail the sequences of a request that is not in the engine, and notify the coroutine."""
        for sequence in self.sequences:
            sequence.fail(error)
        self.untold = []
        self._send(error)

    def end(self, error: Exception) -> None:
        """Notify the coroutine that no updates follow; the sequences stay with a thread that may be lost."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._has_answer.set()
        self._has_update.set()

    def _send(self, refusal: Exception | None) -> None:
        # of a closed loop no coroutine waits for the answer
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answer, refusal)

    def _answer(self, refusal: Exception | None) -> None:
        self._refusal = refusal
        self._has_answer.set()

    async def accepted(self) -> None:
        """Wait until the sequences are in the engine.

        Raises:
            DraftreeError: the reason for which the request was refused.
        """
        await self._has_answer.wait()
        if (error := self._refusal or self._failure) is not None:
            raise error

    @staticmethod
    def deliver(requests: Iterable[Request]) -> list[Request]:
        """Send new output and the ends of sequences, each end once, with one wake-up of each event loop.

        Returns:
            Requests whose event loop is closed; nothing is sent to them.
        """
        news: dict[asyncio.AbstractEventLoop, list[tuple[Request, list[Update]]]] = {}
        for request in requests:
            updates = request._take_updates()
            if updates:
                news.setdefault(request._loop, []).append((request, updates))
        closed: list[Request] = []
        for loop, found in news.items():
            try:
                loop.call_soon_threadsafe(_arrive, found)
            except RuntimeError:
                closed += [request for request, _ in found]
        return closed

    def _take_updates(self) -> list[Update]:
        updates = [update for sequence in self.untold if (update := sequence.take_update()) is not None]
        if updates:
            self.untold = [sequence for sequence in self.untold if not sequence.is_finished]
        return updates

    def read_later(self, updates: Sequence[Update]) -> None:
        """Buffer updates for `next`."""
        for update in updates:
            self._unread.setdefault(update.sequence.index, []).append(update)
            self._num_open -= update.is_last
        self._has_update.set()

    async def next(self) -> Update | None:
        """Return all output of one sequence since its last update, the earliest unread first; None after the end.

        Raises:
            DraftreeError: the request was ended without its last updates.
        """
        while not self._unread:
            if not self._num_open:
                return None
            if self._failure is not None:
                raise self._failure
            self._has_update.clear()
            await self._has_update.wait()
        return Update.joined(self._unread.pop(next(iter(self._unread))))


def _arrive(news: Sequence[tuple[Request, Sequence[Update]]]) -> None:
    for request, updates in news:
        request.read_later(updates)
