"""Connections: slow request heads are closed, others are not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from asgi import echo
from draftree.serve.listening import TimedProtocol

HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


class Impatient(TimedProtocol):
    head_timeout = 0.3


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    config = uvicorn.Config(echo, http=Impatient, lifespan="off", log_config=None, timeout_keep_alive=30)
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


async def sent(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_a_silent_connection_is_closed() -> None:
    async def test() -> None:
        async with listening() as port:
            assert await sent(port) == b""

    run(test())


def test_a_head_that_trickles_is_closed() -> None:
    async def test() -> None:
        async with listening() as port:
            assert await sent(port, *[bytes([sign]) for sign in HEAD[:8]], pause=0.1) == b""

    run(test())


def test_a_second_head_on_the_same_connection_is_limited_too() -> None:
    async def test() -> None:
        async with listening() as port:
            answer = await sent(port, HEAD + b"ab", HEAD[:10], pause=0.05)
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.count(b"HTTP/1.1") == 1

    run(test())


def test_a_slow_body_and_an_idle_connection_are_not_heads() -> None:
    async def test() -> None:
        async with listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(HEAD)
                await asyncio.sleep(0.6)
                writer.write(b"ab")
                answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
                assert answer.startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.6)
            writer.close()

    run(test())
