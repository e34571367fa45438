"""Event streams: headers as soon as a request is accepted, comments while nothing is sent, errors at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from asgi import Answer, call, http_scope
from draftree.serve import streams
from draftree.serve.errors import ApiError
from draftree.serve.streams import EventStream
from event_loop import in_loop
from operated import paused
from serving import HTTP, NAME, running_server


def test_the_headers_come_before_the_first_token() -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 4, "stream": True}
    with (
        running_server(draft=None) as running,
        paused(running) as goes_on,
        HTTP.stream("POST", f"{running.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        goes_on.set()
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


async def streamed(events: AsyncGenerator[bytes, None]) -> Answer:
    return await call(EventStream(events), http_scope(), [])


@in_loop
async def test_a_silent_stream_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_SECONDS", 0.02)
    pings = 0

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal pings
        while pings < 3:  # nothing is accepted yet
            pings += 1
            await asyncio.sleep(0.03)
        yield b""
        yield b"data: 1\n\n"
        raise ApiError(503, "it is over", code="over")

    answer = await streamed(events())
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    before, after = answer.body.split(b"data: 1\n\n")
    assert before.count(streams.PING) >= 1
    assert before.replace(streams.PING, b"") == b""
    assert after.startswith(b'data: {"error":{"message":"it is over"')
    assert after.endswith(b"\n\ndata: [DONE]\n\n")


@in_loop
async def test_an_error_before_acceptance_is_a_response() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise ApiError(429, "full", code="queue_full")
        yield b""

    answer = await streamed(events())
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
