"""Actions submitted to a thread by others. Contains the only lock between them."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import final

from draftree.core.errors import EngineClosedError

FORKED = (
    "the process was forked after the engine was created, and its thread is missing here: create the engine in the "
    "child process, or start it with multiprocessing's 'spawn'"
)
Refuse = Callable[[EngineClosedError], None]


@final
class Mailbox:
    """Actions for one thread, in order of submission.

    For every entry exactly one callable is called, once: the action, by the reading thread; or, if the mailbox was shut
    before, the entry's alternative, with an error.
    """

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[tuple[Callable[[], None], Refuse]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._process = os.getpid()

    def __len__(self) -> int:
        return self._letters.qsize()

    def put(self, action: Callable[[], None], *, otherwise: Refuse) -> None:
        """Submit an action; does not wait. `otherwise` is called with the reason if the action will never run."""
        if os.getpid() != self._process:
            otherwise(EngineClosedError(FORKED))
            return
        with self._lock:
            # under the lock: otherwise it could be added after `shut` emptied the queue
            if self._reason is None:
                self._letters.put((action, otherwise))
                return
        otherwise(EngineClosedError(self._reason))

    def get(self, *, wait: bool, seconds: float = 0.0) -> Callable[[], None] | None:
        """Return the next action; None if there is none, `wait` is False and none comes within some seconds."""
        try:
            return self._letters.get(block=wait or seconds > 0, timeout=None if wait else seconds)[0]
        except queue.Empty:
            return None

    def shut(self, reason: str) -> None:
        """Refuse all queued and later actions; from any thread."""
        with self._lock:
            self._reason = reason
        with contextlib.suppress(queue.Empty):
            while True:
                self._letters.get(block=False)[1](EngineClosedError(reason))
