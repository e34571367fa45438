"""Connections: slow request heads are closed, others are not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import h11
import pytest
import uvicorn

from asgi import echo
from draftree.serve.listening import TimedProtocol
from event_loop import in_loop

HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


class Watched(TimedProtocol):
    """Its connections are kept in the order in which they were made."""

    head_timeout = 60.0
    made: ClassVar[list[Watched]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made.append(self)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "made", [])


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    config = uvicorn.Config(echo, http=Watched, lifespan="off", log_config=None, timeout_keep_alive=60)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        task = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All that the server sends until it closes the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def answer_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the body of a request, and read its answer."""
    writer.write(b"ab")
    answer = await reader.readuntil(b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


@in_loop
async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "head_timeout", 0.05)
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await rest_of(reader) == b""
        writer.close()


@in_loop
async def test_a_head_that_trickles_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a head do not begin the time anew, and the head is never complete."""

    monkeypatch.setattr(Watched, "head_timeout", 0.3)
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        closed = asyncio.ensure_future(rest_of(reader))
        writer.write(HEAD[:10])
        while not closed.done():
            writer.write(b"x")
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(0.01)
        assert await closed == b""
        writer.close()


@in_loop
async def test_a_second_head_on_the_same_connection_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        await answer_of(reader, writer)
        monkeypatch.setattr(Watched, "head_timeout", 0.05)
        writer.write(HEAD[:10])
        assert await rest_of(reader) == b""
        writer.close()


@in_loop
async def test_a_slow_body_and_an_idle_connection_are_not_heads() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(HEAD)
            while not Watched.made or Watched.made[0].conn.their_state is not h11.SEND_BODY:
                await asyncio.sleep(0.001)
            assert Watched.made[0]._timer is None, "the body is not limited"
            await answer_of(reader, writer)
            assert Watched.made[0]._timer is None, "nor is the time between two requests"
        writer.close()
