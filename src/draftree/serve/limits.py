"""Limits of time and size, as ASGI middleware. A body is complete and of allowed size before a handler starts."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftree.serve.errors import ApiError, encode_json
from draftree.serve.records import record_of

CLOSE = {"Connection": "close"}  # header after which the rest of a request is not read


@dataclass(slots=True)
class BodyLimit:
    """Reads bodies before the application: 413 for large ones, with or without Content-Length, 408 for slow ones."""

    app: ASGIApp
    max_bytes: int
    timeout: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_bytes:
            # a client with this header waits before it sends the body
            await self._refuse_large(scope, receive, send, has_more=b"expect" not in headers)
            return
        parts: list[bytes] = []
        message: Message = {"more_body": True}
        size = 0
        try:
            async with asyncio.timeout(self.timeout):
                while message.get("more_body", False) and size <= self.max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
        except TimeoutError:
            text = f"the body did not arrive within {self.timeout:g} s: send it at once"
            error = ApiError(408, text, code="body_timeout", headers=CLOSE)
            await refuse(scope, receive, send, error=error)
            return
        if size > self.max_bytes:
            await self._refuse_large(scope, receive, send, has_more=message.get("more_body", False))
            return
        messages = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    async def _refuse_large(self, scope: Scope, receive: Receive, send: Send, *, has_more: bool) -> None:
        """Send 413, and drop what the client still sends: closing with unread data would reset the connection, and the
        client would lose the answer.
        """
        text = f"the body is larger than {self.max_bytes} bytes, the limit of this server: send less"

        async def send_open(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "more_body": True} if is_body else message)

        await refuse(scope, receive, send_open, error=ApiError(413, text, code="body_too_large", headers=CLOSE))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                while has_more:
                    has_more = (await receive()).get("more_body", False)  # not in a disconnect
        await send({"type": "http.response.body", "body": b""})


@dataclass(slots=True)
class TimeLimit:
    """Ends POST requests that take too long: 504, or an error as the last event of a stream that has begun."""

    app: ASGIApp
    timeout: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        started: Message | None = None

        async def send_noting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message
            await send(message)

        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                await self.app(scope, receive, send_noting)
        except TimeoutError:
            if not deadline.expired():
                raise
            text = f"the request took longer than {self.timeout:g} s, the limit of this server: request fewer tokens"
            error = ApiError(504, text, type="timeout_error", code="request_timeout")
            if started is None:
                await refuse(scope, receive, send, error=error)
            else:
                record_of(scope).error = error.code
                types = [value for name, value in started.get("headers", ()) if name == b"content-type"]
                is_stream = bool(types) and types[0].startswith(b"text/event-stream")
                body = b"data: " + encode_json(error.body()).encode("ascii") + b"\n\n" if is_stream else b""
                await send({"type": "http.response.body", "body": body})


async def refuse(scope: Any, receive: Receive, send: Send, *, error: ApiError) -> None:
    record_of(scope).error = error.code
    await error.response()(scope, receive, send)
