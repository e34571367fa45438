"""Connections that lose, repeat and delay: a transport with seeded faults, and a TCP proxy. Not a test itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from draftree.remote.address import ConnectionLostError
from draftree.remote.transport import Transport, WebSocketTransport


class FaultyTransport(Transport):
    """A transport that loses requests, replies and connections, and repeats frames.

    Args:
        opened: the transport that carries frames.
        faults: the fault of each frame in turn, None for none; shared by successive connections.
        counts: counts the faults.
    """

    KINDS = ("lost request", "lost reply", "repeated", "doubled", "cut")

    def __init__(self, opened: Transport, faults: Iterator[str | None], counts: Counter[str]) -> None:
        super().__init__()
        self._opened, self._faults, self._counts = opened, faults, counts
        self.needs_session = opened.needs_session

    def exchange(self, frame: bytes) -> bytes:
        # a session that no client knows stays until its lease ends: greetings and farewells are left alone
        fault = None if b"hello" in frame or b"bye" in frame else next(self._faults)
        if fault is not None:
            self._counts[fault] += 1
        if fault == "cut":
            self._opened.close()
        if fault == "doubled" and isinstance(self._opened, WebSocketTransport):
            self._opened._result(self._opened._connection.send(frame))  # its reply arrives when another one is expected
        if fault in ("cut", "lost request"):
            raise ConnectionLostError(fault)
        reply = self._opened.exchange(frame)
        self.bytes_up, self.bytes_down = self._opened.bytes_up, self._opened.bytes_down
        if fault == "lost reply":
            raise ConnectionLostError(fault)
        if fault == "repeated":
            return self._opened.exchange(frame)
        return reply

    def receive(self) -> bytes:
        return self._opened.receive()

    def close(self) -> None:
        self._opened.close()


def faulty(connector: Callable[[], Transport], *, seed: int) -> tuple[Callable[[], Transport], Counter[str]]:
    """A connector whose connections have a fault at every second frame, every kind in turn, and the counts."""
    chooser, counts = random.Random(seed), Counter[str]()

    def faults() -> Iterator[str | None]:
        while True:
            for kind in chooser.sample(FaultyTransport.KINDS, len(FaultyTransport.KINDS)):
                yield None
                yield kind

    order = faults()
    return lambda: FaultyTransport(connector(), order, counts), counts


class Proxy:
    """Forwards TCP connections to a server and cuts them after a number of bytes each.

    Args:
        url: of the server.
        cuts: bytes after which successive connections are cut; connections after the last are never cut.
    """

    def __init__(self, url: str, cuts: list[int]) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target, self._cuts = (parts.hostname, parts.port), list(cuts)
        self.num_cut = 0
        self.url = ""

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self._cuts.pop(0) if self._cuts else None
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        budget = [left]

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(4096):
                if budget[0] is not None:
                    budget[0] -= len(data)
                    if budget[0] < 0:
                        return
                sink.write(data)
                await sink.drain()

        pumps = [asyncio.ensure_future(pump(reader, there_writer)), asyncio.ensure_future(pump(there_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_cut += budget[0] is not None and budget[0] < 0
            for one in pumps:
                one.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in (writer, there_writer):
                one.transport.abort()


@contextmanager
def proxied(url: str, cuts: list[int]) -> Iterator[Proxy]:
    """Run a proxy in a thread until the block ends."""
    proxy, loop, started = Proxy(url, cuts), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(proxy._connection, "127.0.0.1", 0)
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        async with server:
            await server.serve_forever()

    task = loop.create_task(serve())

    async def end() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for one in rest:
            one.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(end())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
