"""Grammar compilation with a time limit: each grammar compiles on its own thread, and a request waits up to the limit.

xgrammar cannot be interrupted. A grammar that exceeds the limit continues to compile on its thread after its request
was refused, and its result is cached; the limits on a grammar's size ensure that it terminates. Compilation releases
the interpreter lock, so other threads continue meanwhile.
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
"""The longest time that a request waits for its grammar."""
MAX_COMPILING = 2
"""Concurrent compilations per vocabulary, including those of refused requests."""
CACHE_BYTES = 128 * 2**20
"""Size of the cache of compiled grammars per vocabulary; the least recently used is evicted first."""

Key = tuple[str, ...]


@final
class Compilations:
    """Runs compilations and caches their results. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[Key, Future[Any]] = {}
        self._done: OrderedDict[Key, Any] = OrderedDict()

    def is_done(self, key: Key) -> bool:
        """Return whether a result is cached."""
        with self._changed:
            return key in self._done

    def get(self, key: Key, task: Callable[[], Any]) -> Any:
        """Return the result for a key: from the cache, from a running task, or from this task.

        Raises:
            TimeoutError: the task took longer than COMPILE_SECONDS; it continues.
            QueueFullError: the maximum number of tasks has been running for longer than that.
            Exception: any error that the task raises.
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
                raise QueueFullError(f"{len(self._running)} grammars are still compiling: try again later")
            if key not in self._running:
                self._running[key] = Future()
                # a daemon, so that the process can exit during a compilation
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
