"""Admission of requests: a limit of running texts, a bounded queue, and fairness between API keys.

A request takes one place for each of its texts. Free places go to the waiting key with the fewest running texts; among
equals, to the one that was served longest ago. A key that waits is thus passed at most once by every other key with as
few running texts. A request that needs more places than are free keeps its turn: no other request is admitted before
it. When the queue is full, a key with fewer waiting requests replaces the last one of the key with the most.

A key's own requests are ordered by priority, then by arrival. A priority has no effect on other keys.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import final

from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.serve.errors import ApiError, unavailable

MAX_RETRY_SECONDS = 60
SMOOTHING = 0.1  # weight of the latest request in the mean duration, from which `Retry-After` is estimated


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at the gate; those of a key with a lower `priority` go first."""

    key: str
    arrival: float
    places: int = 1
    priority: int = 0
    waited: float = 0.0
    turn: asyncio.Future[None] | None = field(default=None, repr=False)


@final
class Gate:
    """Admits requests: `max_running` texts, of which one key may hold a share. For one event loop."""

    def __init__(
        self, *, max_running: int, max_waiting: int, key_share: float = 1.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.max_running_per_key = max(1, math.ceil(max_running * key_share))
        self.max_waiting_per_key = math.ceil(max_waiting * key_share)
        self.is_closed = False
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._num_running = 0
        self._queues: dict[str, list[Ticket]] = {}
        """Waiting requests by key, each in order of service; the key that was served longest ago first."""
        self._mean_seconds: float | None = None

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_places(self) -> int:
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def enter(self, key: str, *, texts: int = 1, priority: int = 0) -> AsyncIterator[Ticket]:
        """Wait for places, and hold them; a request for more texts than a key may run takes all places of the key."""
        ticket = Ticket(key, self._clock(), min(texts, self.max_running_per_key), priority)
        await self._wait(ticket)
        start = self._clock()
        ticket.waited = start - ticket.arrival
        try:
            yield ticket
        finally:
            self._learn(self._clock() - start)
            self._leave(ticket)

    def close(self) -> None:
        """Refuse new and waiting requests; running ones continue."""
        self.is_closed = True
        for queue in self._queues.values():
            for ticket in queue:
                _refuse(ticket, unavailable("shutting_down"))
        self._queues.clear()

    def retry_seconds(self) -> int:
        """Return the estimated seconds until the queue has moved on: mean duration times waiting texts per place."""
        if self._mean_seconds is None:
            return 1
        texts = sum(ticket.places for queue in self._queues.values() for ticket in queue)
        seconds = self._mean_seconds * (texts + 1) / self.max_running
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(seconds)))

    async def _wait(self, ticket: Ticket) -> None:
        if self.is_closed:
            raise unavailable("shutting_down")
        if not self._queues.get(ticket.key) and self._next_key() is None and self._fits(ticket):
            self._take(ticket)
            return
        self._make_room(ticket.key)
        ticket.turn = asyncio.get_running_loop().create_future()
        bisect.insort(self._queues.setdefault(ticket.key, []), ticket, key=lambda other: other.priority)
        self._admit()
        try:
            await ticket.turn
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise

    def _take(self, ticket: Ticket) -> None:
        self._running[ticket.key] += ticket.places
        self._num_running += 1

    def _fits(self, ticket: Ticket) -> bool:
        return self._fits_key(ticket) and self.num_places + ticket.places <= self.max_running

    def _fits_key(self, ticket: Ticket) -> bool:
        return self._running[ticket.key] + ticket.places <= self.max_running_per_key

    def _next_key(self) -> str | None:
        """Return the key whose turn it is: one whose first request fits into its share; None if there is none."""
        eligible = [key for key, queue in self._queues.items() if self._fits_key(queue[0])]
        return min(eligible, key=lambda other: self._running[other], default=None)  # the first of equals

    def _make_room(self, key: str) -> None:
        """Raise unless the queue has room for one more request of a key; another key's latest may have to leave."""
        num_queued = len(self._queues.get(key, ()))
        if self.max_waiting_per_key <= num_queued < self.max_waiting:
            raise self._too_many(key, num_queued)
        if self.num_waiting < self.max_waiting:
            return
        longest = max(self._queues, key=lambda other: len(self._queues[other]), default=key)
        held = len(self._queues.get(longest, ()))
        if held <= num_queued + 1:
            text = f"{self.num_waiting} requests are waiting, as many as the queue holds"
            text += ": retry after the time in Retry-After"
            raise ApiError(503, text, code="queue_full", headers=self._retry_after())
        _refuse(self._queues[longest].pop(), self._too_many(longest, held))

    def _admit(self) -> None:
        """Give free places to waiting requests."""
        while (key := self._next_key()) is not None and self._fits(self._queues[key][0]):
            queue = self._queues.pop(key)
            ticket = queue.pop(0)
            if queue:
                self._queues[key] = queue  # last in turn from now on
            assert ticket.turn is not None
            if not ticket.turn.done():
                self._take(ticket)
                ticket.turn.set_result(None)

    def _give_up(self, ticket: Ticket) -> None:
        """Remove a cancelled request from the queue, or return the places that it has just been given."""
        queue = self._queues.get(ticket.key, [])
        if ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._queues[ticket.key]
            self._admit()  # it may have kept the turn for more places than are free
        elif (turn := ticket.turn) and turn.done() and not turn.cancelled() and turn.exception() is None:
            self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        self._num_running -= 1
        self._running[ticket.key] -= ticket.places
        if not self._running[ticket.key]:
            del self._running[ticket.key]
        self._admit()

    def _learn(self, seconds: float) -> None:
        mean = seconds if self._mean_seconds is None else self._mean_seconds
        self._mean_seconds = mean + SMOOTHING * (seconds - mean)

    def _too_many(self, key: str, count: int) -> ApiError:
        return ApiError(
            429,
            f"{count} requests with this API key are waiting, its share of the queue: retry after the time in "
            "Retry-After, or send fewer at once",
            code="key_limit",
            headers=self._retry_after(),
        )

    def _retry_after(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_seconds())}


def _refuse(ticket: Ticket, error: ApiError) -> None:
    if ticket.turn is not None and not ticket.turn.done():
        ticket.turn.set_exception(error)
