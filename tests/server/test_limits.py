"""Limits of bodies and of time: sizes with and without Content-Length, slow bodies, slow answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asgi import GONE, Answer, body_parts, call, echo, http_scope
from draftree.serve.limits import BodyLimit, TimeLimit
from draftree.serve.records import record_of

LIMIT = 10


def answer(app: Any, scope: dict[str, Any], messages: list[dict[str, Any]]) -> Answer:
    return asyncio.run(asyncio.wait_for(call(app, scope, messages), 30))


def limited(**options: Any) -> BodyLimit:
    return BodyLimit(echo, **({"max_bytes": LIMIT, "timeout": 5.0} | options))


def test_a_body_of_the_allowed_size_arrives_whole() -> None:
    found = answer(limited(), http_scope(headers={"Content-Length": "10"}), body_parts(b"01234", b"56789"))
    assert (found.status, found.body) == (200, b"0123456789")


@pytest.mark.parametrize(
    ("headers", "parts"),
    [
        ({"Content-Length": "11"}, [b""]),
        ({"Content-Length": "99999999999999999999"}, [b""]),
        ({"Transfer-Encoding": "chunked"}, [b"01234", b"567890"]),
        ({"Content-Length": "3"}, [b"01234567890"]),
        ({}, [b"01234567890", b"more", b"and more"]),
    ],
)
def test_a_larger_body_is_refused_with_413(headers: dict[str, str], parts: list[bytes]) -> None:
    found = answer(limited(), http_scope(headers=headers), body_parts(*parts))
    assert found.status == 413
    assert found.json["error"]["code"] == "body_too_large"
    assert "larger than 10 bytes" in found.json["error"]["message"]
    assert found.headers["connection"] == "close"


def test_no_more_is_read_than_the_limit() -> None:
    parts = body_parts(*[b"0123456789"] * 1000)
    read: list[int] = []

    async def run() -> None:
        async def receive() -> Any:
            read.append(1)
            return parts[len(read) - 1]

        async def send(message: Any) -> None:
            pass

        await limited()(http_scope(), receive, send)

    asyncio.run(run())
    assert len(read) == 2


def test_a_body_that_does_not_arrive_is_refused_with_408() -> None:
    found = answer(limited(timeout=0.02), http_scope(), [{"type": "http.request", "body": b"012", "more_body": True}])
    assert found.status == 408
    assert found.json["error"]["code"] == "body_timeout"


def test_a_client_that_leaves_while_it_sends_gets_no_answer() -> None:
    found = answer(limited(), http_scope(), [{"type": "http.request", "body": b"012", "more_body": True}, GONE])
    assert found.messages == []


def test_a_disconnect_after_the_body_reaches_the_application() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([await receive(), await receive()])

    answer(BodyLimit(app, max_bytes=LIMIT, timeout=5.0), http_scope(), [*body_parts(b"0", b"1"), GONE])
    assert [message["type"] for message in seen] == ["http.request", "http.disconnect"]
    assert seen[0]["body"] == b"01"


def slow(content_type: bytes, *, starts: bool) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if starts:
            headers = [(b"content-type", content_type)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(60)

    return app


def test_a_request_that_takes_too_long_is_refused_with_504() -> None:
    scope = http_scope()
    found = answer(TimeLimit(slow(b"", starts=False), timeout=0.02), scope, [])
    assert found.status == 504
    assert found.json["error"]["type"] == "timeout_error"
    assert record_of(scope).error == "request_timeout"


def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    found = answer(TimeLimit(slow(b"text/event-stream; charset=utf-8", starts=True), timeout=0.02), http_scope(), [])
    first, last = found.body.decode().strip().split("\n\n")
    assert (found.status, first) == (200, "data: 1")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert not found.messages[-1].get("more_body", False)


def test_another_answer_that_takes_too_long_just_ends() -> None:
    found = answer(TimeLimit(slow(b"text/plain", starts=True), timeout=0.02), http_scope(), [])
    assert found.body == b"data: 1\n\n"


def test_only_posts_are_limited() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await echo(scope, receive, send)

    found = answer(TimeLimit(app, timeout=0.01), http_scope("GET"), body_parts(b""))
    assert found.status == 200


def test_a_timeout_of_the_application_itself_is_not_taken_for_the_limit() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        answer(TimeLimit(app, timeout=5.0), http_scope(), [])
