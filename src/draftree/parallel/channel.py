"""Connections between rank 0 and the other ranks: messages, reports and lifelines.

Rank 0 listens on a free port and publishes it, with a secret, in the store of the job. Each other rank connects twice:
for messages and reports, and for the lifeline. Only numbers and texts travel, never pickled objects.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from draftree.core.errors import RankError, harmless
from draftree.models.base import Close, Commit, Edit, Extend, Fork, LayerSubset, Pass, Slot, Truncate
from draftree.parallel.world import World

# Detection of ended processes: a connection that carries nothing while both ends live.
#
# A process that waits inside a collective operation cannot check anything, so a thread watches the connections. When
# one is lost, the process has `GRACE_SECONDS` to end by itself, for example by the error of a broken collective; then
# the thread ends it.

GRACE_SECONDS = 2.0  # time from a lost connection to the end of the process
LISTENED_GRACE_SECONDS = 10.0
"""The same for a process with listeners, such as a server that sends errors to its clients before it ends."""
FAILED = 1  # exit status of a process that ends because another one ended
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
    """Watches connections to other ranks on a thread of its own."""

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self._rank, self._peers = rank, dict(peers)
        global _current  # noqa: PLW0603, a process belongs to one job
        self._ended, self._has_failed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []
        self.releases: list[Callable[[], None]] = []
        """Functions that let a pass return that waits for an ended process; called until this process ends."""
        self.failure: str | None = None  # why this process has to end; None as long as all processes live
        self.is_told = False  # whether the failure was raised as an error, which its reader shows
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
        self._send(LENGTH.pack(len(data)) + data)

    def end(self) -> None:
        """Tell the other ranks that this process ends as planned, and stop watching."""
        self._send(CLEAN)
        self.drop()

    def _send(self, data: bytes) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # it ended already
                peer.sendall(data)

    def drop(self) -> None:
        """Close the connections without a word, as the end of the process would."""
        with self._lock:
            self._ended.set()
            for peer in self._peers.values():
                peer.close()

    def wait(self, seconds: float) -> None:
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
                (length,) = LENGTH.unpack(first + _received_exactly(peer, LENGTH.size - 1))
                text = _received_exactly(peer, min(length, MAX_TEXT)).decode("utf-8", "replace")
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


# Messages from rank 0 to the other ranks: the operations of one round as JSON, after a header of four numbers.
#
# These are the edits since the last pass, among them the commits that walks decided, and the pass. Slots travel as
# their ids, which are the same in all processes.

MAGIC = 0x647261667472
VERSION = 3
HEADER = struct.Struct("<4q")  # `MAGIC`, `VERSION`, number of the message, and bytes after the header
MAX_BYTES = 1 << 29  # upper bound of a message's length; a larger one is malformed
EDITS: dict[str, type[Edit]] = {"commit": Commit, "truncate": Truncate, "fork": Fork, "close": Close}
Operation = Edit | tuple[Any, ...]
"""An edit; `("open",)`; `("reserve", num_slots, length)`; `("run", pass, number of open slots)`; or
`("ask", name of a method that all ranks compute together, width of a row)`."""


class MessageError(RuntimeError):
    """A malformed message, or one that does not continue the last one."""


class MessageWriter:
    def __init__(self) -> None:
        self._operations: list[tuple[Any, ...]] = []
        self._sent = 0

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, *operation: Any) -> None:
        self._operations.append(operation)

    def edits(self, edits: Sequence[Edit]) -> None:
        """Add edits; before they are applied, because closed slots have no id."""
        for edit in edits:
            name = type(edit).__name__.lower()
            match edit:
                case Commit(slot, path, keep):
                    self.add(name, slot.id, _numbers(path), _numbers(keep))
                case Truncate(slot, length) | Fork(slot, length):
                    self.add(name, slot.id, length)
                case Close(slot):
                    self.add(name, slot.id)

    def run(self, pass_: Pass, num_open: int) -> None:
        jobs = [
            (
                job.slot.id,
                _numbers(job.tokens),
                _numbers(job.parents),
                None if job.logits_at is None else _numbers(job.logits_at),
                job.settled,
            )
            for job in pass_.jobs
        ]
        part = pass_.layers
        self.add("run", num_open, jobs, (part.end, sorted(part.attention), sorted(part.mlp)), pass_.capture)

    def take(self, *, is_last: bool = False) -> bytes:
        rest = json.dumps((is_last, self._operations), separators=(",", ":")).encode()
        header = HEADER.pack(MAGIC, VERSION, self._sent, len(rest))
        self._operations, self._sent = [], self._sent + 1
        return header + rest


def _numbers(values: Sequence[int]) -> list[int]:
    return list(map(int, values))


class MessageReader:
    def __init__(self) -> None:
        self._received = 0

    @staticmethod
    def rest_of(header: bytes) -> int:
        magic, version, _, length = HEADER.unpack(header)
        if (magic, version) != (MAGIC, VERSION) or not 0 <= length <= MAX_BYTES:
            raise MessageError(
                f"a message begins with {magic}, {version}, {length} and not with {MAGIC}, {VERSION} and a length: "
                "all processes need the same version of Draftree"
            )
        return int(length)

    def read(self, header: bytes, rest: bytes, slots: Mapping[int, Slot]) -> tuple[bool, Iterator[Operation]]:
        """Return whether a message is the last, and its operations; a slot must exist when it is used."""
        number = HEADER.unpack(header)[2]
        if number != self._received:
            raise MessageError(f"message {number} came instead of message {self._received}")
        self._received += 1
        try:
            is_last, operations = json.loads(rest)
        except (ValueError, TypeError) as error:
            raise MessageError(f"message {number} cannot be read: {error}") from error
        return bool(is_last), (_operation(operation, slots) for operation in operations)


def _operation(operation: Any, slots: Mapping[int, Slot]) -> Operation:
    try:
        match operation:
            case ["open"] | ["reserve", int(), int()] | ["ask", str(), int()]:
                return tuple(operation)
            case ["run", int(num_open), jobs, [end, attention, mlp], capture]:
                part = LayerSubset(end, frozenset(attention), frozenset(mlp))
                extends = [Extend(slots[slot], *rest) for slot, *rest in jobs]
                return "run", Pass(extends, part, tuple(capture)), num_open
            case [str(name), int(number), *rest] if name in EDITS:
                return EDITS[name](slots[number], *rest)
    except KeyError as error:
        raise MessageError(f"a message names slot {error}, which is not open") from error
    except (TypeError, ValueError) as error:
        raise MessageError(f"the operation {operation!r:.60} cannot be read: {error}") from error
    raise MessageError(f"a message has the operation {operation!r:.60}, which does not exist")


JOIN_SECONDS = 1800.0  # time for all processes to start; rank 0 may download the model meanwhile
HELLO_SECONDS = 10.0
STORE_POLL_SECONDS = 0.1
PROBE_SECONDS = 10
PROBES = 6  # a silent connection is probed every `PROBE_SECONDS`; after this many probes without an answer it is lost
LOOPBACK = "127.0.0.1"
SECRET_BYTES = 16
HELLO = struct.Struct(f"<{SECRET_BYTES}sqq")  # secret, rank, and kind of a connection
MESSAGES, LIFELINE = 0, 1
MAX_REPORT = 1 << 40


def ending_with(reason: str) -> str:
    """Return the message of an error after which the model cannot be used."""
    return f"{reason}; the model cannot be used any more: start all processes again"


class Leader:
    """Rank 0's connections to all other ranks. Not thread-safe."""

    def __init__(self, world: World, *, join_seconds: float = JOIN_SECONDS) -> None:
        ranks = range(1, world.size)
        host = LOOPBACK if world.is_one_machine else ""
        secret = secrets.token_bytes(SECRET_BYTES)
        with socket.create_server((host, 0), backlog=2 * world.size) as listener:
            name = LOOPBACK if world.is_one_machine else os.environ.get("MASTER_ADDR", socket.gethostname())
            world.store.set(world.next_name("address"), f"{name} {listener.getsockname()[1]} {secret.hex()}")
            accepted = _accepted(listener, secret, ranks, time.monotonic() + join_seconds)
        self._peers = {rank: accepted[rank, MESSAGES] for rank in ranks}
        self.lifelines = Lifelines(0, {rank: accepted[rank, LIFELINE] for rank in ranks})
        self.num_bytes = self.num_messages = 0  # bytes and messages sent so far, to one rank

    @property
    def is_open(self) -> bool:
        return bool(self._peers)

    def send(self, message: bytes) -> None:
        self.num_bytes += len(message)
        self.num_messages += 1
        if not self._peers or self.lifelines.failure is not None:
            self.give_up(None)
        for peer in self._peers.values():
            try:
                peer.sendall(message)
            except OSError as error:
                self.give_up(error)

    def reports(self) -> list[bytes]:
        reports = []
        for peer in self._peers.values():
            try:
                (length,) = LENGTH.unpack(_received_exactly(peer, LENGTH.size))
                reports.append(_received_exactly(peer, min(length, MAX_REPORT)))
            except OSError as error:
                self.give_up(error)
        return reports

    def give_up(self, cause: BaseException | None) -> NoReturn:
        """End the connections without a stop, which ends the other ranks, and raise."""
        if self._peers and self.lifelines.failure is None:
            self.lifelines.wait(STORE_POLL_SECONDS * 5)  # the reason may still be on its way
        reason = self.lifelines.failure
        if reason is None:
            reason = "the other ranks were stopped" if cause is None else f"rank 0 failed: {cause}"
        self.lifelines.is_told = True
        self.drop()
        raise RankError(ending_with(reason)) from cause

    def drop(self) -> None:
        """End the connections without a stop, which ends the other ranks."""
        self._close()
        self.lifelines.drop()

    def close(self) -> None:
        """End the connections after a stop message; idempotent."""
        if self._peers:
            self._close()
            self.lifelines.end()

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}


class Member:
    """Connection of another rank to rank 0. Not thread-safe."""

    def __init__(self, world: World, *, join_seconds: float = JOIN_SECONDS) -> None:
        key = world.next_name("address")
        end = time.monotonic() + join_seconds
        while not world.store.check([key]):  # short waits, so that signals are handled
            if time.monotonic() > end:
                raise RankError(f"rank {world.rank} waited {join_seconds:.0f} s for rank 0: start all processes again")
            time.sleep(STORE_POLL_SECONDS)
        host, port, secret = world.store.get(key).decode().split()
        self.rank = world.rank
        self._messages = _connected(host, int(port), HELLO.pack(bytes.fromhex(secret), world.rank, MESSAGES))
        lifeline = _connected(host, int(port), HELLO.pack(bytes.fromhex(secret), world.rank, LIFELINE))
        self.lifelines = Lifelines(world.rank, {0: lifeline})

    def receive(self) -> tuple[bytes, bytes]:
        try:
            header = _received_exactly(self._messages, HEADER.size)
            return header, _received_exactly(self._messages, MessageReader.rest_of(header))
        except OSError as error:
            raise RankError(f"rank 0 ended, so rank {self.rank} ends") from error

    def report(self, data: bytes) -> None:
        try:
            self._messages.sendall(LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RankError(f"rank 0 ended, so rank {self.rank} ends") from error

    def close(self) -> None:
        self._messages.close()
        self.lifelines.end()


def _accepted(listener: socket.socket, secret: bytes, ranks: range, end: float) -> dict[tuple[int, int], socket.socket]:
    """Accept both connections of each rank; strangers, who lack the secret, are dropped."""
    accepted: dict[tuple[int, int], socket.socket] = {}
    while len(accepted) < 2 * len(ranks):
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            peer, _ = listener.accept()
        except TimeoutError as error:
            missing = sorted({rank for rank in ranks for kind in (MESSAGES, LIFELINE) if (rank, kind) not in accepted})
            raise RankError(f"ranks {missing} did not connect: start all processes with the same options") from error
        peer.settimeout(HELLO_SECONDS)
        known = b""
        rank = 0
        kind = 0
        with contextlib.suppress(OSError):
            known, rank, kind = HELLO.unpack(_received_exactly(peer, HELLO.size))
        if secrets.compare_digest(known, secret) and rank in ranks and kind in (MESSAGES, LIFELINE):
            accepted[rank, kind] = _settled(peer)
        else:
            peer.close()
    return accepted


def _connected(host: str, port: int, hello: bytes) -> socket.socket:
    try:
        peer = _settled(socket.create_connection((host, port), timeout=HELLO_SECONDS))
        peer.sendall(hello)
    except OSError as error:
        raise RankError(f"rank 0 cannot be reached at {host}:{port} ({error}): start all processes again") from error
    return peer


def _settled(peer: socket.socket) -> socket.socket:
    """Let a connection wait for ever, unless the other machine vanishes: it sends no end, but leaves probes alone."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, PROBE_SECONDS)
    else:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    return peer


def _received_exactly(peer: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        received = peer.recv_into(view[at:])
        if not received:
            raise ConnectionError("the connection ended")
        at += received
    return bytes(data)
