"""Connections: slow request heads are closed, others are not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar

import h11
import pytest
import uvicorn

from asgi import echo
from draftree.serve.limits import BodyLimit
from draftree.serve.listening import FullNotice, TimedProtocol
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
async def listening(app: Any = echo) -> AsyncIterator[int]:
    config = uvicorn.Config(app, http=Watched, lifespan="off", log_config=None, timeout_keep_alive=60)
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


LENGTH, CHUNKS = b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n"
AMBIGUOUS = {
    "two lengths of one body": b"POST /echo HTTP/1.1\r\nHost: x\r\n" + LENGTH + CHUNKS + b"\r\n0\r\n\r\n",
    "a folded line": b"POST /echo HTTP/1.1\r\nHost: x\r\nX: a\r\n " + LENGTH + b"\r\nab",
    "a folded line with a tab": b"POST /echo HTTP/1.1\r\nHost: x\r\nX: a\r\n\tb\r\n" + LENGTH + b"\r\nab",
    "bare line feeds": b"POST /echo HTTP/1.1\nHost: x\nContent-Length: 2\n\nab",
    "one bare line feed": b"POST /echo HTTP/1.1\r\nHost: x\nX: y\r\n" + LENGTH + b"\r\nab",
    "a bare line feed at the end": b"POST /echo HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"\nab",
}


@in_loop
@pytest.mark.parametrize("name", AMBIGUOUS)
@pytest.mark.parametrize("first", [b"", HEAD + b"\n\n"])
async def test_requests_that_others_may_divide_differently_are_refused(name: str, first: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first + AMBIGUOUS[name])
        answers = await rest_of(reader)  # also: the connection is closed
        assert answers.count(b"HTTP/1.1 200") == (1 if first else 0)
        assert answers.count(b"HTTP/1.1 400") == 1
        writer.close()


@in_loop
async def test_a_client_that_still_sends_gets_the_answer_that_its_body_is_too_large() -> None:
    size = 64 << 20  # more than the buffers of the connection
    async with listening(BodyLimit(echo, max_bytes=10, timeout=600.0)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 20):
            writer.write(bytes(1 << 20))
            await writer.drain()
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"body_too_large" in answer
        writer.close()


@in_loop
async def test_connections_beyond_the_limit_are_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Watched, "max_connections", 2)
    monkeypatch.setattr(Watched, "notice", FullNotice())
    async with listening() as port, AsyncExitStack() as stack:

        async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.push_async_callback(writer.wait_closed)
            stack.callback(writer.close)
            return reader, writer

        (_, first), second = await connected(), await connected()
        while len(Watched.made) < 2:
            await asyncio.sleep(0.01)
        for _ in range(3):
            refused, _ = await connected()
            assert (await rest_of(refused)).startswith(b"HTTP/1.1 503")
        (line,) = caplog.records
        assert line.getMessage().startswith("connections are refused: 2 are open")
        second[1].write(HEAD)
        await answer_of(*second)  # open ones are served
        first.close()
        while len(Watched.made[0].connections) > 1:
            await asyncio.sleep(0.01)
        third = await connected()
        third[1].write(HEAD)
        await answer_of(*third)  # and further ones, when one has ended


@pytest.mark.parametrize("descriptors", [64, 256])
def test_a_server_without_free_descriptors_logs_one_line(descriptors: int) -> None:
    code = f"""
import asyncio, logging, resource, socket, sys
sys.path[:0] = {sys.path!r}
import uvicorn
resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))
from asgi import echo
from draftree.serve.listening import ConnectionLimits, FullNotice, TimedProtocol
logging.basicConfig(stream=sys.stderr)
async def main():
    limits, notice = ConnectionLimits.of_process(), FullNotice()
    kind = type("Kind", (TimedProtocol,), {{"max_connections": limits.most, "notice": notice}})
    asyncio.get_running_loop().set_exception_handler(notice.handle)
    config = uvicorn.Config(echo, http=kind, backlog=limits.at_once, lifespan="off", log_config=None)
    server, bound = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[bound]))
    print(bound.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    with open("/dev/null"):  # a descriptor is left
        print("opened", flush=True)
    server.should_exit = True
    await task
asyncio.run(main())
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as ran:
        assert ran.stdin is not None
        assert ran.stdout is not None
        assert ran.stderr is not None
        port = int(ran.stdout.readline())
        idle = []
        for _ in range(2 * descriptors):
            connection = socket.socket()
            connection.settimeout(0.05)  # the rest waits in the backlog
            with contextlib.suppress(TimeoutError):
                connection.connect(("127.0.0.1", port))
            idle.append(connection)
        assert "connections are refused" in ran.stderr.readline()
        ran.stdin.close()
        assert ran.stdout.readline() == "opened\n"
        for connection in idle:
            connection.close()
        assert ran.wait(60) == 0
        assert ran.stderr.read() == ""


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
