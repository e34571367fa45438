"""HTTP requests and answers as values between proxy and replicas, and the call of an ASGI app. Needs no ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from draftree.serve.ray.prefixes import Blocks

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CANCELLING_SECONDS = 5.0
"""Time that an app gets to end a request after the client left; then its task is cancelled."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request with its whole body, and what the router needs of it.

    Attributes:
        scope: picklable part of the ASGI scope.
        body: whole body.
        blocks: hashes of the prompt's beginning.
        avoid: ids of replicas that failed this request.
    """

    scope: dict[str, Any]
    body: bytes
    blocks: Blocks = ()
    avoid: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Status and headers of an answer, and the id of the replica that gives it."""

    status: int
    headers: Headers
    replica: str


Part = AnswerStart | bytes


def picklable_scope(scope: Scope) -> dict[str, Any]:
    """Return the fields of a scope that describe the request; the rest belongs to the server that received it."""
    kept = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
    found = {name: scope[name] for name in kept if name in scope}
    return found | {"headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]], "root_path": ""}


async def call_app(app: App, request: HttpRequest, *, replica: str) -> AsyncGenerator[Part, None]:
    """Call an ASGI app and yield its answer. Closing the generator disconnects the client of the app.

    Args:
        app: an ASGI app whose lifespan has started.
        request: the request.
        replica: id of this replica.
    """
    parts: asyncio.Queue[Part | None] = asyncio.Queue()
    left = asyncio.Event()
    bodies = [request.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            parts.put_nowait(AnswerStart(message["status"], headers, replica))
        elif message["type"] == "http.response.body" and message.get("body"):
            parts.put_nowait(bytes(message["body"]))

    task = asyncio.create_task(_run(app, dict(request.scope), receive, send, parts))
    try:
        while (part := await parts.get()) is not None:
            if isinstance(part, AnswerStart):
                yield part
                continue
            chunks, is_last = _drained(part, parts)
            yield chunks
            if is_last:
                break
        await task
    finally:
        left.set()
        await _end(task)


async def _run(app: App, scope: Scope, receive: Receive, send: Send, parts: asyncio.Queue[Part | None]) -> None:
    try:
        await app(scope, receive, send)
    finally:
        parts.put_nowait(None)


def _drained(first: bytes, parts: asyncio.Queue[Part | None]) -> tuple[bytes, bool]:
    """Return the chunks that wait as one, and whether the answer ends with them."""
    chunks = [first]
    while not parts.empty():
        part = parts.get_nowait()
        if part is None:
            return b"".join(chunks), True
        assert isinstance(part, bytes), "the start comes before all chunks"
        chunks.append(part)
    return b"".join(chunks), False


async def _end(task: asyncio.Task[None]) -> None:
    if not task.done():
        await asyncio.wait([task], timeout=CANCELLING_SECONDS)
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
