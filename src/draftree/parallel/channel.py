"""Connections between rank 0 and the other ranks: messages, reports and lifelines.

Rank 0 listens on a free port and publishes it, with a secret, in the store of the job. Each other rank connects twice:
for messages and reports, and for the lifeline. Only integers and texts travel, never pickled objects.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import time
from typing import NoReturn

from draftree.core.errors import RankError
from draftree.parallel.lifeline import Lifelines
from draftree.parallel.messages import HEADER, NUMBER_BYTES, MessageReader
from draftree.parallel.world import World

__all__ = ["Leader", "Member", "ending_with"]

JOIN_SECONDS = 1800.0
"""Time for all processes to start; rank 0 may download the model meanwhile."""
HELLO_SECONDS = 10.0
POLL_SECONDS = 0.1
PROBE_SECONDS = 10
PROBES = 6
"""A silent connection is probed every `PROBE_SECONDS`; after this many probes without an answer it is lost."""
LOOPBACK = "127.0.0.1"
SECRET_BYTES = 16
HELLO = struct.Struct(f"<{SECRET_BYTES}sqq")
"""Secret, rank, and kind of a connection."""
MESSAGES, LIFELINE = 0, 1
LENGTH = struct.Struct("<q")
MAX_REPORT = 1 << 40


def ending_with(reason: str) -> str:
    """Return the message of an error after which the model cannot be used."""
    return f"{reason}; the model cannot be used any more: start all processes again"


class Leader:
    """Rank 0's connections to all other ranks. Not thread-safe.

    Args:
        world: the processes.

    Raises:
        RankError: not all ranks connected in time.
    """

    def __init__(self, world: World, *, join_seconds: float = JOIN_SECONDS) -> None:
        ranks = range(1, world.size)
        host = LOOPBACK if world.is_one_machine else ""
        secret = secrets.token_bytes(SECRET_BYTES)
        with socket.create_server((host, 0), backlog=2 * world.size) as listener:
            name = LOOPBACK if world.is_one_machine else os.environ.get("MASTER_ADDR", socket.gethostname())
            world.store.set(world.next_name("address"), f"{name} {listener.getsockname()[1]} {secret.hex()}")
            found = _accepted(listener, secret, ranks, time.monotonic() + join_seconds)
        self._peers = {rank: found[rank, MESSAGES] for rank in ranks}
        self.lifelines = Lifelines(0, {rank: found[rank, LIFELINE] for rank in ranks})
        self.num_bytes = self.num_messages = 0
        """Bytes and messages sent so far, to one rank."""

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return bool(self._peers)

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks.

        Raises:
            RankError: a rank ended.
        """
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
        """Return one report of each other rank, in the order of the ranks.

        Raises:
            RankError: a rank ended.
        """
        found = []
        for peer in self._peers.values():
            try:
                (length,) = LENGTH.unpack(_exactly(peer, LENGTH.size))
                found.append(_exactly(peer, min(length, MAX_REPORT)))
            except OSError as error:
                self.give_up(error)
        return found

    def give_up(self, cause: BaseException | None) -> NoReturn:
        """End the connections without a stop, which ends the other ranks, and raise.

        Raises:
            RankError: always.
        """
        if self._peers and self.lifelines.failure is None:
            self.lifelines.wait(POLL_SECONDS * 5)  # the reason may still be on its way
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
    """Connection of another rank to rank 0. Not thread-safe.

    Args:
        world: the processes.

    Raises:
        RankError: rank 0 did not listen in time.
    """

    def __init__(self, world: World, *, join_seconds: float = JOIN_SECONDS) -> None:
        key = world.next_name("address")
        end = time.monotonic() + join_seconds
        while not world.store.check([key]):  # short waits, so that signals are handled
            if time.monotonic() > end:
                raise RankError(f"rank {world.rank} waited {join_seconds:.0f} s for rank 0: start all processes again")
            time.sleep(POLL_SECONDS)
        host, port, secret = world.store.get(key).decode().split()
        self.rank = world.rank
        self._messages = _connected(host, int(port), HELLO.pack(bytes.fromhex(secret), world.rank, MESSAGES))
        lifeline = _connected(host, int(port), HELLO.pack(bytes.fromhex(secret), world.rank, LIFELINE))
        self.lifelines = Lifelines(world.rank, {0: lifeline})

    def receive(self) -> tuple[bytes, bytes]:
        """Wait for a message; return its header and the rest.

        Raises:
            RankError: rank 0 ended.
        """
        try:
            header = _exactly(self._messages, HEADER * NUMBER_BYTES)
            return header, _exactly(self._messages, MessageReader.rest_of(header))
        except OSError as error:
            raise RankError(f"rank 0 ended, so rank {self.rank} ends") from error

    def report(self, data: bytes) -> None:
        """Send a report to rank 0.

        Raises:
            RankError: rank 0 ended.
        """
        try:
            self._messages.sendall(LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RankError(f"rank 0 ended, so rank {self.rank} ends") from error

    def fail(self, reason: str) -> None:
        """Tell rank 0 why this rank cannot go on."""
        self.lifelines.fail(reason)

    def close(self) -> None:
        """End the connection as planned."""
        self._messages.close()
        self.lifelines.end()


def _accepted(listener: socket.socket, secret: bytes, ranks: range, end: float) -> dict[tuple[int, int], socket.socket]:
    """Accept both connections of each rank; strangers, who lack the secret, are dropped."""
    found: dict[tuple[int, int], socket.socket] = {}
    while len(found) < 2 * len(ranks):
        left = end - time.monotonic()
        listener.settimeout(max(0.01, left))
        try:
            peer, _ = listener.accept()
        except TimeoutError as error:
            missing = sorted({rank for rank in ranks for kind in (MESSAGES, LIFELINE) if (rank, kind) not in found})
            raise RankError(f"ranks {missing} did not connect: start all processes with the same options") from error
        peer.settimeout(HELLO_SECONDS)
        try:
            known, rank, kind = HELLO.unpack(_exactly(peer, HELLO.size))
        except OSError:
            peer.close()
            continue
        if not secrets.compare_digest(known, secret) or rank not in ranks or kind not in (MESSAGES, LIFELINE):
            peer.close()
            continue
        found[rank, kind] = _settled(peer)
    return found


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


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        received = peer.recv_into(view[at:])
        if not received:
            raise ConnectionError("the connection ended")
        at += received
    return bytes(data)
