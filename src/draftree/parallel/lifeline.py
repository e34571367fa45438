"""Detection of ended processes: a connection that carries nothing while both ends live.

A process that waits inside a collective operation cannot check anything, so a thread watches the connections. When one
is lost, the process has `GRACE_SECONDS` to end by itself, for example by the error of a broken collective; then the
thread ends it.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping

from draftree.core.errors import harmless

__all__ = ["ALONE", "FAILED", "GRACE_SECONDS", "Lifelines", "lost_process"]

GRACE_SECONDS = 2.0
"""Time from a lost connection to the end of the process."""
LISTENED_GRACE_SECONDS = 10.0
"""The same for a process with listeners, such as a server that sends errors to its clients before it ends."""
FAILED = 1
"""Exit status of a process that ends because another one ended."""
POLL_SECONDS = 0.2
NOTICE_SECONDS = 0.5
"""Time within which the end of another process is noticed here, if it is what a launcher ends this process for."""
ALONE = "this process ends, because it cannot go on alone"
CLEAN = b"."
LENGTH = struct.Struct("<q")
MAX_TEXT = 1 << 16


_current: Lifelines | None = None


def lost_process() -> str | None:
    """Return why this process has to end if another one of its job ended; None if none did.

    A launcher that ends this process because another one ended may be faster than the thread that watches, so it is
    waited for.
    """
    return None if _current is None else _current.noticed()


class Lifelines:
    """Watches connections to other ranks on a thread of its own.

    Args:
        rank: of this process.
        peers: connected sockets by rank.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self._rank, self._peers = rank, dict(peers)
        global _current  # noqa: PLW0603, a process belongs to one job
        self._ended, self._has_failed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []
        self.releases: list[Callable[[], None]] = []
        """Functions that let a pass return that waits for an ended process; called until this process ends."""
        self.failure: str | None = None
        """Why this process has to end; None as long as all processes live."""
        self.is_told = False
        """Whether the failure was raised as an error, which its reader shows."""
        self._thread = threading.Thread(target=self._watch, name="draftree-lifelines", daemon=True)
        self._thread.start()
        _current = self

    def noticed(self) -> str | None:
        """Return `failure`, after a short wait unless the connections were closed here."""
        if not self._ended.is_set():
            self._has_failed.wait(NOTICE_SECONDS)
        return self.failure

    def on_failure(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Add a function that gets `failure` when it occurs, on the thread that watches; it must return soon.

        The process then has `LISTENED_GRACE_SECONDS` to end by itself.

        Returns:
            A function that removes the callback.
        """
        with self._lock:
            self._listeners.append(callback)

        def remove() -> None:
            with self._lock:
                if callback in self._listeners:
                    self._listeners.remove(callback)

        return remove

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this process cannot go on."""
        data = reason.encode("utf-8", "replace")[:MAX_TEXT]
        for peer in self._peers.values():
            try:
                peer.sendall(LENGTH.pack(len(data)) + data)
            except OSError:
                continue  # it ended already

    def end(self) -> None:
        """Tell the other ranks that this process ends as planned, and stop watching."""
        for peer in self._peers.values():
            try:
                peer.sendall(CLEAN)
            except OSError:
                continue
        self.drop()

    def drop(self) -> None:
        """Close the connections without a word, as the end of the process would."""
        with self._lock:
            self._ended.set()
            for peer in self._peers.values():
                peer.close()

    def wait(self, seconds: float) -> None:
        """Wait until the connections end, at most this long."""
        self._thread.join(seconds)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            with self._lock:
                if self._ended.is_set():
                    return
                for rank, peer in self._peers.items():
                    selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._ended.is_set():
                for key, _ in selector.select(POLL_SECONDS):
                    reason = self._read(key.data)
                    with self._lock:
                        if self._ended.is_set():
                            return
                        selector.unregister(key.fileobj)
                    if reason is not None:
                        self._lose(reason)
                        return

    def _read(self, rank: int) -> str | None:
        """Return why a rank's connection ended; None if it ended as planned."""
        peer = self._peers[rank]
        try:
            first = peer.recv(1)
            if first == CLEAN:
                return None
            if first:
                (length,) = LENGTH.unpack(first + _exactly(peer, LENGTH.size - 1))
                text = _exactly(peer, min(length, MAX_TEXT)).decode("utf-8", "replace")
                return f"rank {rank} failed: {text}"
        except OSError:
            pass
        return f"rank {rank} ended without a word"

    def _lose(self, reason: str) -> None:
        with self._lock:
            self.failure, listeners = reason, tuple(self._listeners)
        self._has_failed.set()
        self._release()
        for listener in listeners:
            listener(reason)
        end = time.monotonic() + (LISTENED_GRACE_SECONDS if listeners else GRACE_SECONDS)
        while time.monotonic() < end:
            if self._ended.wait(POLL_SECONDS):
                return
            self._release()  # again: a pass may have begun after the last time
        if not self.is_told and self._rank == 0 and sys.stderr is not None:
            sys.stderr.write(harmless(f"error: {reason}; {ALONE}\n"))
            sys.stderr.flush()
        leave(FAILED)

    def _release(self) -> None:
        for release in self.releases:
            release()


def leave(status: int) -> None:
    """End the process at once; a thread that waits in a collective operation may never end."""
    os._exit(status)


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection ended")
        data += part
    return data
