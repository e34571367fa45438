"""The last rounds of all models, for several readers. A slow reader misses rounds; it never delays an engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, final

from draftree.core.types import RoundRecord, SequenceRecord

__all__ = ["FeedRound", "RoundFeed"]

KEPT = 256
"""Rounds that a reader can be late."""
PAUSE_SECONDS = 0.02
"""Shortest time between two batches of one reader: many short rounds are sent together."""


@dataclass(frozen=True, slots=True)
class FeedRound:
    """One round of one model.

    Attributes:
        number: running number over all models; a gap means that a reader missed rounds.
        model: name of the model.
        time: end of the round in seconds since 1970.
        record: its record.
    """

    number: int
    model: str
    time: float
    record: RoundRecord

    def as_json(self) -> dict[str, Any]:
        """Return plain values without any text or token."""
        record = self.record
        seconds = {
            "plan": record.plan_seconds,
            "draft": record.draft_seconds,
            "score": record.score_seconds,
            "verify": record.verify_seconds,
            "commit": record.commit_seconds,
            "total": record.total_seconds,
        }
        return {
            "number": self.number,
            "model": self.model,
            "time": self.time,
            "seconds": {name: round(value, 7) for name, value in seconds.items()},
            "rows": record.num_rows,
            "sequences": [_sequence(row) for row in record.sequences],
        }


def _sequence(row: SequenceRecord) -> dict[str, Any]:
    return {
        "request_id": row.request_id,
        "index": row.index,
        "num_drafted": row.num_drafted,
        "num_accepted": row.num_accepted,
        "num_written": row.num_written,
        "depth": row.draft_depth,
    }


@final
class RoundFeed:
    """The last rounds. `listener` is for engines' threads, the rest for the event loop.

    Args:
        size: rounds that are kept.
    """

    def __init__(self, size: int = KEPT) -> None:
        self._kept: deque[FeedRound] = deque(maxlen=size)
        self._number = 0
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def num_readers(self) -> int:
        """Number of current readers."""
        return len(self._readers)

    def listener(self, model: str) -> Callable[[RoundRecord], None]:
        """Return the listener of a model's rounds."""

        def push(record: RoundRecord) -> None:
            if not self._readers:
                return
            with self._lock:
                self._number += 1
                self._kept.append(FeedRound(self._number, model, time.time(), record))
                self._wake()

        return push

    async def read(self, *, heartbeat: float = 15.0) -> AsyncGenerator[list[FeedRound], None]:
        """Yield batches of new rounds until the feed is closed; an empty batch if none came for a while.

        Args:
            heartbeat: seconds after which an empty batch is yielded.
        """
        arrived = asyncio.Event()
        with self._lock:
            self._readers[arrived] = asyncio.get_running_loop()
            last = self._number
        try:
            while not self._is_closed:
                try:
                    await asyncio.wait_for(arrived.wait(), heartbeat)
                except TimeoutError:
                    yield []
                    continue
                arrived.clear()
                with self._lock:
                    new = [kept for kept in self._kept if kept.number > last]
                if new:
                    last = new[-1].number
                    yield new
                    await asyncio.sleep(PAUSE_SECONDS)
        finally:
            with self._lock:
                del self._readers[arrived]

    def close(self) -> None:
        """End all readers."""
        with self._lock:
            self._is_closed = True
            self._wake()

    def _wake(self) -> None:
        for arrived, loop in self._readers.items():
            if not arrived.is_set():
                # a closed loop has no readers any more
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(arrived.set)
