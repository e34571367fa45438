"""Readers of the engines' rounds: the feed of the status page, and trace files."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

from draftree.core.types import RoundRecord
from draftree.engine.trace import TraceHeader, TraceWriter
from draftree.serve.errors import ApiError
from draftree.serve.metrics import PHASES
from draftree.serve.settings import ServerSettings
from draftree.text.retokenize import pieces_of
from draftree.version import __version__

if TYPE_CHECKING:
    from draftree.serve.pool import ServedModel

KEPT = 256
PAUSE_SECONDS = 0.02  # shortest time between two batches of one reader: many short rounds are sent together
RETRY_SECONDS = 30  # `Retry-After` of a refused reader: readers stay for minutes or hours


@dataclass(frozen=True, slots=True)
class FeedRound:
    """One round of one model; a gap in the `number` over all models means that a reader missed rounds."""

    number: int
    model: str
    time: float
    record: RoundRecord

    def as_json(self) -> dict[str, Any]:
        record = self.record
        seconds = {name: round(getattr(record, f"{name}_seconds"), 7) for name in (*PHASES, "total")}
        return {
            "number": self.number,
            "model": self.model,
            "time": self.time,
            "seconds": seconds,
            "rows": record.num_rows,
            "sequences": [
                {
                    "request_id": row.request_id,
                    "index": row.index,
                    "num_drafted": row.num_drafted,
                    "num_accepted": row.num_accepted,
                    "num_written": row.num_written,
                    "depth": row.draft_depth,
                }
                for row in record.sequences
            ],
        }


@final
class RoundFeed:
    """The last rounds. `listener` is for engines' threads, the rest for the event loop."""

    def __init__(self, size: int = KEPT, *, max_readers: int | None = None) -> None:
        self._max_readers = max_readers
        self._kept: deque[FeedRound] = deque(maxlen=size)
        self._number = 0
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def listener(self, model: str) -> Callable[[RoundRecord], None]:
        def push(record: RoundRecord) -> None:
            if not self._readers:
                return
            with self._lock:
                self._number += 1
                self._kept.append(FeedRound(self._number, model, time.time(), record))
                self._wake()

        return push

    async def read(self) -> AsyncGenerator[list[FeedRound], None]:
        """Yield an empty batch as soon as rounds are kept for this reader, then new rounds until the feed is closed."""
        arrived = asyncio.Event()
        with self._lock:
            if self._max_readers is not None and len(self._readers) >= self._max_readers:
                raise ApiError(
                    429,
                    f"{self._max_readers} clients read the rounds, as many as this server allows: retry after the "
                    "time in Retry-After, or read /draftree/status",
                    code="too_many_readers",
                    headers={"Retry-After": str(RETRY_SECONDS)},
                )
            last = self._number
            self._readers[arrived] = asyncio.get_running_loop()
        try:
            yield []
            while not self._is_closed:
                await arrived.wait()
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
        with self._lock:
            self._is_closed = True
            self._wake()

    def _wake(self) -> None:
        for arrived, loop in self._readers.items():
            if not arrived.is_set():
                # a closed loop has no readers any more
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(arrived.set)


def trace_paths(settings: ServerSettings) -> list[Path]:
    if settings.record is None:
        return []
    path = Path(settings.record)
    if len(settings.models) == 1:
        return [path]
    names = [re.sub(r"[^\w.+-]+", "_", choice.name) for choice in settings.models]
    return [path.with_stem(f"{path.stem}-{name}") for name in names]


@final
class ServerTraces:
    """The open traces of a server; does nothing unless the settings request traces."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        names = [choice.name for choice in settings.models]
        self._paths = dict(zip(names, trace_paths(settings), strict=False))
        self._open: list[tuple[TraceWriter, IO[str], ServedModel]] = []

    def begin(self, model: ServedModel) -> Callable[[RoundRecord], None] | None:
        """Write the first line of a model's trace; returns the listener of its rounds, None without a trace."""
        path = self._paths.get(model.name)
        if path is None:
            return None
        llm, settings = model.llm.llm, self._settings
        stream = path.open("x", encoding="utf-8", buffering=1)  # complete lines, also of a server that is killed
        writer = TraceWriter(stream)
        draft = (llm.drafts or ("none",))[0]
        about = {
            "drafts": list(llm.drafts),
            "kernels": llm.kernels,
            "dtype": settings.options.dtype,
            "draftree": __version__,
        }
        plan = settings.options.plan or "auto"
        parts, seconds = llm.planner.parts, llm.planner.pass_seconds
        writer.begin(TraceHeader(model.name, draft, settings.options.verify, plan, parts, seconds, about))
        llm.requests.records_picks = True
        self._open.append((writer, stream, model))
        return writer

    def close(self) -> None:
        for writer, stream, model in self._open:
            writer.end(pieces_of(model.tokenizer))
            stream.close()
        self._open = []
