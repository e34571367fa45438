"""Compiling in bounded time: each grammar on a thread of its own, which a request waits for as long as it may.

xgrammar cannot be interrupted. A grammar that takes too long goes on compiling on its thread after its request was
refused, and is kept when it is done; the bounds of a grammar's size see to it that it ends. It compiles without the
interpreter's lock, so other threads go on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, final

from draftree.core.errors import QueueFullError

COMPILE_SECONDS = 20.0
"""A request waits so long for its grammar."""
MAX_COMPILING = 2
"""Grammars of one vocabulary that compile at the same time, those of refused requests included."""
CACHE_BYTES = 128 * 2**20
"""Compiled grammars of one vocabulary that are kept, least recently used first to go."""

Key = tuple[str, str]


@final
class Compilations:
    """Runs compilations, and keeps their results. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[Key, Future[Any]] = {}
        self._done: OrderedDict[Key, Any] = OrderedDict()

    def is_done(self, key: Key) -> bool:
        """Whether a result is kept."""
        with self._changed:
            return key in self._done

    def get(self, key: Key, task: Callable[[], Any]) -> Any:
        """The result for a key: kept, on its way, or made by the task.

        Raises:
            TimeoutError: the task took longer than COMPILE_SECONDS; it goes on.
            QueueFullError: as many tasks as may run for longer than that already.
            Exception: whatever the task raises.
        """
        deadline = time.monotonic() + COMPILE_SECONDS
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: key in self._done or key in self._running or len(self._running) < MAX_COMPILING,
                COMPILE_SECONDS,
            )
            if key in self._done:
                self._done.move_to_end(key)
                return self._done[key]
            if not has_room:
                raise QueueFullError(
                    f"{len(self._running)} grammars are being compiled, and take long: try again later"
                )
            if key not in self._running:
                self._running[key] = Future()
                # a daemon: a process may end while it compiles
                threading.Thread(target=self._run, args=(key, task), name="draftree-grammar", daemon=True).start()
            running = self._running[key]
        return running.result(max(0.0, deadline - time.monotonic()))

    def _run(self, key: Key, task: Callable[[], Any]) -> None:
        future = self._running[key]
        try:
            result = task()
        except BaseException as error:
            self._finish(key)
            future.set_exception(error)
        else:
            self._finish(key, result)
            future.set_result(result)

    def _finish(self, key: Key, *results: Any) -> None:
        with self._changed:
            del self._running[key]
            self._done.update((key, result) for result in results)
            while len(self._done) > 1 and sum(one.memory_size_bytes for one in self._done.values()) > CACHE_BYTES:
                self._done.popitem(last=False)
            self._changed.notify_all()
