"""Streams of server-sent events and of JSON lines, and the end of work for a client that is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftree.serve.errors import ApiError, Shape, api_error, encode_json
from draftree.serve.records import record_of

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
PING = b": ping\n\n"
PING_SECONDS = 15.0  # silence after which a comment is sent; shorter than the idle timeouts of common proxies
CLOSED_REQUEST = 499


class ChunkEncoder:
    """Encodes the chunks of one stream. What all of them begin with is encoded once."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._start = f"data: {encode_json(fields)[:-1]},"

    def event(self, fields: Mapping[str, Any]) -> bytes:
        return f"{self._start}{encode_json(fields)[1:]}\n\n".encode("ascii")


class ClientGoneError(Exception):
    """The client closed the connection before the response."""


def event(content: Any, name: str | None = None) -> bytes:
    data = f"data: {encode_json(content)}\n\n"
    return (data if name is None else f"event: {name}\n{data}").encode("ascii")


class EventStream(Response):
    """Sends events as they come. A client that leaves ends the generator at once.

    The headers are sent with the first event, which may be empty and means that the request is accepted: an error
    before it becomes an HTTP response of its own, a later one becomes the last event. While the stream is silent,
    comments show proxies and clients that the connection is alive; the first one also sends the headers. sse-starlette
    sends them before it asks for an event, so that no error could have a status of its own.
    """

    media_type = "text/event-stream"
    ping: ClassVar[bytes] = PING

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        done: bytes = DONE,
        on_error: Callable[[ApiError], bytes] = lambda error: event(error.body()),
        shape: Shape | None = None,
    ) -> None:
        super().__init__(b"", 200, HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._done = done
        self._on_error = on_error
        self._shape = shape
        self._is_begun = False
        self._num_sent = 0
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinging = asyncio.create_task(self._ping(send))
        try:
            async with contextlib.aclosing(self._events):
                async for data in self._events:
                    await self._push(send, data)
        except Exception as error:
            known = api_error(error)
            record_of(scope).error = known.code or known.type
            known.shape = self._shape or known.shape
            async with self._sending:
                if not self._is_begun:
                    await known.response()(scope, receive, send)
                    return
            await self._push(send, self._on_error(known))
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": self._done})

    async def _ping(self, send: Send) -> None:
        while True:
            before = self._num_sent
            await asyncio.sleep(PING_SECONDS)
            if self._num_sent == before:
                await self._push(send, self.ping)

    async def _push(self, send: Send, data: bytes) -> None:
        async with self._sending:
            if not self._is_begun:
                self._is_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if data:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": data, "more_body": True})


class LineStream(EventStream):
    media_type = "application/x-ndjson"
    ping: ClassVar[bytes] = b""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await work, and cancel it if the client leaves."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def respond(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response of some work; an empty one if the client left."""
    try:
        return await unless_gone(request.receive, work)
    except ClientGoneError:
        return Response(status_code=CLOSED_REQUEST)
