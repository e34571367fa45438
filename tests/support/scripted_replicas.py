"""Scripted replicas, and requests to them through the proxy. Not a test itself; needs no ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from draftree.serve.ray.proxy import Proxy, RetryPolicy
from draftree.serve.ray.wire import AnswerStart, HttpRequest, Part

STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
PATIENT = RetryPolicy(window=600.0, first_pause=0.001, longest_pause=0.001)
IMPATIENT = RetryPolicy(window=0.05, first_pause=0.001, longest_pause=0.001)
"""For requests that no replica completes."""


class Scripted:
    """Replicas whose answers are scripts, one per attempt: parts, or an error to raise."""

    def __init__(self, *scripts: list[Part | Exception]) -> None:
        self.scripts = list(scripts)
        self.requests: list[HttpRequest] = []
        self.num_closed = 0

    async def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
        self.requests.append(request)
        try:
            for part in self.scripts.pop(0):
                if isinstance(part, Exception):
                    raise part
                yield part
                await asyncio.sleep(0)
        finally:
            self.num_closed += 1


def started(status: int = 200, *headers: tuple[bytes, bytes], replica: str = "a") -> AnswerStart:
    return AnswerStart(status, list(headers), replica)


def streamed(events: list[str], *, replica: str = "a") -> list[Part | Exception]:
    return [started(200, STREAM, replica=replica), *(f"{event}\n\n".encode() for event in events)]


def scope_of(path: str, method: str = "POST") -> dict[str, Any]:
    fixed = {"type": "http", "http_version": "1.1", "scheme": "http", "raw_path": path.encode(), "query_string": b""}
    return fixed | {"method": method, "path": path, "headers": [(b"content-length", b"1"), (b"x-request-id", b"7")]}


def ask(
    replicas: Any,
    body: object,
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    limit: int = 10**6,
    retry: RetryPolicy = PATIENT,
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send one request through the proxy."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def run() -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        bodies = [
            {"type": "http.request", "body": raw[:3], "more_body": True},
            {"type": "http.request", "body": raw[3:]},
        ]

        async def receive() -> Any:
            if bodies:
                return bodies.pop(0)
            await asyncio.Event().wait()
            raise AssertionError

        await Proxy(replicas, max_body_bytes=limit, body_timeout=60, retry=retry)(scope_of(path, method), receive, send)

    asyncio.run(run())
    assert [m["type"] for m in messages].count("http.response.start") == 1
    assert [m.get("more_body") for m in messages[1:]] == [True] * (len(messages) - 2) + [False]
    return messages[0]["status"], dict(messages[0]["headers"]), b"".join(m["body"] for m in messages[1:])
