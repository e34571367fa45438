"""Requests that are repeated after the loss of a replica, with scripted replicas and without ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from draftree.serve.ray.prefixes import prefix_blocks
from draftree.serve.ray.proxy import Proxy, ReplicaLostError, prepared
from draftree.serve.ray.wire import HttpRequest, Part
from replica_streams import TEXTS, chat_events, data_of, sse, summary_of
from scripted_replicas import IMPATIENT, PATIENT, STREAM, Scripted, ask, scope_of, started, streamed

CHAT = {"messages": [{"role": "user", "content": "x" * 100}], "stream": True}
LOST = ReplicaLostError("the actor died")


def test_a_streamed_text_continues_on_another_replica_with_the_seed_that_the_proxy_chose() -> None:
    events = chat_events(1)
    replicas = Scripted(
        [*streamed(events[:5], replica="a"), LOST],
        [ReplicaLostError("died before its answer", "b")],
        streamed(chat_events(2), replica="c"),
    )
    status, _, body = ask(replicas, CHAT)
    received = body.decode().removesuffix("\n\n").split("\n\n")
    assert status == 200
    assert received[:5] == events[:5]
    assert summary_of(received)[0][1]["content"] == TEXTS[1]
    assert [request.avoid for request in replicas.requests] == [set(), {"a"}, {"a", "b"}]
    bodies = [json.loads(request.body) for request in replicas.requests]
    assert bodies[0] == bodies[1] == bodies[2]
    assert isinstance(bodies[0].pop("seed"), int)
    assert bodies[0] == CHAT
    for request in replicas.requests:
        assert dict(request.scope["headers"])[b"content-length"] == str(len(request.body)).encode()
        assert request.blocks == prefix_blocks(CHAT) != ()


@pytest.mark.parametrize("body", [CHAT | {"seed": 3}, CHAT | {"stream": False}, {"messages": []}, [1]])
def test_other_bodies_are_forwarded_unchanged(body: object) -> None:
    replicas = Scripted([started(), b"{}"])
    ask(replicas, body)
    assert json.loads(replicas.requests[0].body) == body
    assert dict(replicas.requests[0].scope["headers"])[b"x-request-id"] == b"7"


def test_fresh_seeds_differ() -> None:
    replicas = Scripted(*([started(), b"{}"] for _ in range(2)))
    for _ in range(2):
        ask(replicas, CHAT | {"seed": -1})
    first, second = (json.loads(request.body)["seed"] for request in replicas.requests)
    assert first != second
    assert min(first, second) >= 0


def test_an_answer_that_is_no_stream_is_repeated_as_a_whole() -> None:
    replicas = Scripted(
        [started(), b'{"half"', LOST],
        [started(200, (b"x-replica", b"b"), (b"X-Request-Id", b"7")), b'{"who', b'le": 1}'],
    )
    status, headers, body = ask(replicas, CHAT | {"stream": False})
    assert (status, headers, body) == (200, {b"x-replica": b"b", b"x-draftree-replica": b"a"}, b'{"whole": 1}')
    assert replicas.num_closed == 2


@pytest.mark.parametrize("code", ["shutting_down", "process_lost"])
def test_a_replica_that_ends_is_left_for_another_one(code: str) -> None:
    shutting = sse({"error": {"message": "the server ends", "code": code}})
    replicas = Scripted(
        [started(503), b"{}"],
        # one chunk holds text and the error: the text is sent once
        [started(200, STREAM), "".join(f"{event}\n\n" for event in [*chat_events(1)[:4], shutting]).encode()],
        [started(429), b"{}"],
        streamed(chat_events(3)),
    )
    status, _, body = ask(replicas, CHAT)
    received = body.decode().removesuffix("\n\n").split("\n\n")
    assert status == 200
    assert summary_of(received)[0][0]["content"] == TEXTS[0]
    assert not replicas.scripts


def test_a_full_queue_and_other_refusals_are_answers() -> None:
    for status in (400, 401, 429):
        assert ask(Scripted([started(status), b'{"error": 1}']), CHAT)[0] == status
    assert ask(Scripted([started(503), b"draining"]), b"", path="/ready", method="GET")[0] == 503


def test_a_client_gets_an_error_if_no_replica_is_left() -> None:
    class Dead:
        async def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
            raise LOST
            yield b""

    status, headers, body = ask(Dead(), CHAT, retry=IMPATIENT)
    assert (status, headers[b"retry-after"]) == (503, b"5")
    assert json.loads(body)["error"]["code"] == "no_replica"


def test_a_stream_that_cannot_be_completed_ends_with_an_error_event() -> None:
    other = chat_events(2, ["Once upon a night", TEXTS[1]])
    for then, code, retry in (([LOST], "no_replica", IMPATIENT), (streamed(other), "diverged", PATIENT)):
        scripts: list[list[Part | Exception]] = [[*streamed(chat_events(1)[:-4]), LOST], *([then] * 200)]
        _, _, body = ask(Scripted(*scripts), CHAT, retry=retry)
        *_, error, done, empty = body.decode().split("\n\n")
        assert (data_of([error])[0]["error"]["code"], done, empty) == (code, "data: [DONE]", "")


def test_an_unexpected_error_is_not_shown() -> None:
    for before in ([], [started(200, STREAM), b"data: {}\n\n"]):
        _, _, body = ask(Scripted([*before, ZeroDivisionError("secret")]), CHAT)
        assert b"internal_error" in body
        assert b"secret" not in body


def test_a_body_above_the_limit_is_refused() -> None:
    status, _, body = ask(Scripted(), CHAT, limit=100)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


def test_streams_without_text_are_forwarded_as_they_are() -> None:
    events = [sse({"round": n}) for n in range(3)]
    _, _, body = ask(Scripted(streamed(events)), b"", path="/draftree/rounds", method="GET")
    assert body.decode() == "".join(f"{event}\n\n" for event in events)


def test_the_client_that_leaves_closes_the_stream_of_the_replica() -> None:
    async def run() -> bool:
        is_closed = asyncio.Event()

        class Endless:
            async def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
                yield started(200, STREAM)
                try:
                    while True:
                        await asyncio.sleep(0.001)
                        yield b": wait\n\n"
                finally:
                    is_closed.set()

        messages: Iterator[Any] = iter([{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}])

        async def receive() -> Any:
            await asyncio.sleep(0.02)
            return next(messages)

        async def send(message: Any) -> None:
            pass

        proxy = Proxy(Endless(), max_body_bytes=100, body_timeout=60, retry=PATIENT)
        await asyncio.wait_for(proxy(scope_of("/v1/chat/completions"), receive, send), 60)
        return is_closed.is_set()

    assert asyncio.run(run())


def test_a_request_without_an_id_gets_one_for_all_repetitions() -> None:
    replicas = Scripted([LOST], [started(), b"{}"])
    scope = scope_of("/v1/chat/completions") | {"headers": []}
    request, _ = prepared(scope, json.dumps(CHAT | {"seed": 1}).encode())
    ask(replicas, CHAT | {"seed": 1})
    assert dict(request.scope["headers"])[b"x-request-id"].startswith(b"req-")
    assert replicas.requests[0].scope == replicas.requests[1].scope


def test_a_slow_body_is_refused() -> None:
    messages: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        messages.append(message)

    proxy = Proxy(Scripted(), max_body_bytes=100, body_timeout=0.01)
    asyncio.run(proxy(scope_of("/v1/chat/completions"), receive, send))
    assert messages[0]["status"] == 408
