"""Reads the stream of rounds on a thread of its own, and connects again when it breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from draftree.cli.watching.client import RefusedError, RoundStream, ServerClient, UnreachableError

__all__ = ["Backoff", "RoundListener"]

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0


class Backoff:
    """Pauses between attempts, each twice as long as the one before. Mutated by its methods."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE_SECONDS

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return pause

    def reset(self) -> None:
        """Begin again, after a success."""
        self._pause = FIRST_PAUSE_SECONDS


class RoundListener:
    """Reads rounds until it is closed. A refusal ends it: the status meets the same one and reports it.

    Args:
        client: the server.
        add: called with every round, on the listener's thread.
    """

    def __init__(self, client: ServerClient, add: Callable[[dict[str, Any]], None]) -> None:
        self._client = client
        self._add = add
        self._closed = threading.Event()
        self._stream: RoundStream | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="draftree-watch-rounds", daemon=True)

    def __enter__(self) -> RoundListener:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        with self._lock:
            if self._stream is not None:
                self._stream.interrupt()
        self._thread.join(timeout=1)  # an attempt to connect cannot be interrupted, and the thread is a daemon

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closed.is_set():
            try:
                with self._client.rounds() as stream:
                    self._hold(stream)
                    for values in stream:
                        backoff.reset()
                        self._add(values)
            except RefusedError:
                return
            except UnreachableError:
                pass
            finally:
                self._hold(None)
            self._closed.wait(backoff.next())

    def _hold(self, stream: RoundStream | None) -> None:
        with self._lock:
            self._stream = stream
            if stream is not None and self._closed.is_set():
                stream.interrupt()
