"""ASGI applications called without a server: one request, and what they send. Not a test itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass
class Answer:
    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def http_scope(method: str = "POST", path: str = "/echo", headers: dict[str, str] | None = None) -> dict[str, Any]:
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    return {"type": "http", "method": method, "path": path, "headers": pairs, "query_string": b"", "state": {}}


def body_parts(*parts: bytes) -> list[Message]:
    last = len(parts) - 1
    return [{"type": "http.request", "body": part, "more_body": n < last} for n, part in enumerate(parts)]


GONE: Message = {"type": "http.disconnect"}


async def call(app: App, scope: dict[str, Any], messages: Sequence[Message] = ()) -> Answer:
    """The answer to one request; after these messages the client waits without a word."""
    arriving, answer = list(messages), Answer()

    async def receive() -> Message:
        if arriving:
            return arriving.pop(0)
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    async def send(message: Message) -> None:
        answer.messages.append(dict(message))

    await app(scope, receive, send)
    return answer


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Sends the body back in one part for each message that arrived."""
    parts = []
    while True:
        message = await receive()
        parts.append(message["body"])
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"|".join(parts), "more_body": False})
