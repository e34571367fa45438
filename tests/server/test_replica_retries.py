"""Requests that are repeated after the loss of a replica, with scripted replicas and without ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from draftree.serve.ray.exposition import merged_metrics
from draftree.serve.ray.prefixes import prefix_blocks
from draftree.serve.ray.proxy import Proxy, ReplicaLostError, RetryPolicy, prepared
from draftree.serve.ray.wire import AnswerStart, HttpRequest, Part, call_app
from replica_streams import TEXTS, chat_events, data_of, sse, summary_of

STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
QUICK = RetryPolicy(window=0.5, first_pause=0.01, longest_pause=0.02)


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
    replicas: Any, body: object, *, path: str = "/v1/chat/completions", method: str = "POST", limit: int = 10**6
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

        await Proxy(replicas, max_body_bytes=limit, body_timeout=5, retry=QUICK)(scope_of(path, method), receive, send)

    asyncio.run(run())
    assert [m["type"] for m in messages].count("http.response.start") == 1
    assert [m.get("more_body") for m in messages[1:]] == [True] * (len(messages) - 2) + [False]
    return messages[0]["status"], dict(messages[0]["headers"]), b"".join(m["body"] for m in messages[1:])


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


def test_a_replica_that_shuts_down_is_left_for_another_one() -> None:
    shutting = sse({"error": {"message": "the server is shutting down", "code": "shutting_down"}})
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

    status, headers, body = ask(Dead(), CHAT)
    assert (status, headers[b"retry-after"]) == (503, b"5")
    assert json.loads(body)["error"]["code"] == "no_replica"


def test_a_stream_that_cannot_be_completed_ends_with_an_error_event() -> None:
    other = chat_events(2, ["Once upon a night", TEXTS[1]])
    for then, code in (([LOST], "no_replica"), (streamed(other), "diverged")):
        scripts: list[list[Part | Exception]] = [[*streamed(chat_events(1)[:-4]), LOST], *([then] * 200)]
        _, _, body = ask(Scripted(*scripts), CHAT)
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

        proxy = Proxy(Endless(), max_body_bytes=100, body_timeout=5, retry=QUICK)
        await asyncio.wait_for(proxy(scope_of("/v1/chat/completions"), receive, send), 5)
        return is_closed.is_set()

    assert asyncio.run(run())


def in_process(app: Callable[..., Any], *, take: int | None = None) -> list[Part]:
    """Call an app with one request and return the parts of its answer; leave after `take` of them."""

    async def run() -> list[Part]:
        parts: list[Part] = []
        answer = call_app(app, HttpRequest(scope_of("/x"), b"body"), replica="r")
        async for part in answer:
            parts.append(part)
            if len(parts) == take:
                break
        await answer.aclose()
        return parts

    return asyncio.run(run())


def test_an_app_gets_the_request_and_its_answer_is_yielded() -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": message["body"] + scope["path"].encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"!"})

    assert in_process(echo) == [AnswerStart(201, [(b"a", b"b")], "r"), b"body/x!"]


def test_an_app_whose_client_left_is_told_and_ends() -> None:
    ended = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        ended.append((await receive())["type"])

    assert in_process(endless, take=1) == [AnswerStart(200, [], "r")]
    assert ended == ["http.disconnect"]


def test_an_error_of_an_app_is_raised() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_process(broken)


def test_metrics_of_all_replicas_are_merged_by_metric() -> None:
    head = "# HELP up Works\n# TYPE up gauge\n"
    texts = {"a": head + "up 1\n", "b": head + 'up{model="m}",key="k"} 0\n# TYPE n counter\nn_total 3\n'}
    assert merged_metrics(texts, num_repeated=2) == (
        head
        + 'up{replica="a"} 1\nup{model="m}",key="k",replica="b"} 0\n'
        + '# TYPE n counter\nn_total{replica="b"} 3\n'
        + "# HELP draftree_repeated_requests_total Requests that were repeated on another replica\n"
        + "# TYPE draftree_repeated_requests_total counter\ndraftree_repeated_requests_total 2\n"
    )


@pytest.mark.parametrize("is_allowed", [True, False])
def test_metrics_are_those_of_all_replicas_or_the_refusal_of_one(is_allowed: bool) -> None:
    class Two:
        async def everywhere(self, request: HttpRequest) -> list[list[Part]]:
            assert dict(request.scope["headers"])[b"x-request-id"] == b"7"
            second = [started(200, replica="b"), b"up 0\n"] if is_allowed else [started(401, replica="b"), b"no"]
            return [[started(200, (b"content-length", b"5"), replica="a"), b"up ", b"1\n"], second]

    status, headers, body = ask(Two(), b"", path="/metrics", method="GET")
    assert (status, headers) == (200 if is_allowed else 401, {})
    assert body.startswith(b'up{replica="a"} 1\nup{replica="b"} 0\n') if is_allowed else body == b"no"


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
