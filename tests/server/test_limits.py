"""Limits of bodies, times, places and queues: of the middleware and of a running server."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from asgi import GONE, Answer, body_parts, call, echo, http_scope
from draftree.serve.limits import BodyLimit, TimeLimit
from draftree.serve.records import record_of
from operated import body, code_of, paused, post, wait_for
from serving import HTTP, NAME, running_server, send, settings

LIMIT = 10


def answer(app: Any, scope: dict[str, Any], messages: list[dict[str, Any]]) -> Answer:
    return asyncio.run(call(app, scope, messages))


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


def test_the_rest_of_a_larger_body_is_dropped_after_the_answer() -> None:
    parts = body_parts(*[b"0123456789"] * 1000)
    order: list[str] = []

    async def run() -> None:
        async def receive() -> Any:
            order.append("read")
            return parts[len(order) - order.count("sent") - 1]

        async def send(message: Any) -> None:
            order.append("sent")

        await limited()(http_scope(), receive, send)

    asyncio.run(run())
    assert order == ["read"] * 2 + ["sent"] * 2 + ["read"] * 998 + ["sent"]


def test_a_client_that_sends_on_is_left_after_a_while() -> None:
    found = answer(limited(timeout=0.05), http_scope(headers={"Content-Length": "11"}), [])
    assert found.status == 413


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


@pytest.mark.parametrize(
    ("options", "given", "status", "code"),
    [
        ({"max_body_bytes": 100}, {"prompt": "x" * 200}, 413, "body_too_large"),
        ({"max_prompt_tokens": 4}, {"prompt": "a b c d e f g h i j k l m n o p"}, 400, "context_length_exceeded"),
        (
            {"max_prompt_tokens": 4},
            {"prompt": "a b c d e f g h i" * 1000},
            400,
            "context_length_exceeded",
        ),
        ({}, {"prompt": [5] * 600}, 400, "context_length_exceeded"),
        ({}, {"prompt": "a b c d e f g h i" * 10_000}, 400, "context_length_exceeded"),
        ({"max_completion_tokens": 7}, {}, 400, None),
        ({"max_choices": 2}, {"n": 3}, 400, None),
        ({"request_timeout": 0.0001}, {"max_tokens": 400}, 504, "request_timeout"),
    ],
)
def test_limits_of_the_server(options: dict[str, Any], given: dict[str, Any], status: int, code: str | None) -> None:
    with running_server(settings_given=settings(**options)) as running:
        answer = post(running, **given)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert running.server.num_active == 0


def test_requests_within_the_limits_are_served() -> None:
    given = settings(max_prompt_tokens=64, max_completion_tokens=8, max_choices=2)
    with running_server(settings_given=given) as running:
        answer = post(running, n=2, temperature=1)
        assert answer.status_code == 200
        messages = [{"role": "user", "content": "ab"}]
        chat = {"model": NAME, "messages": messages, "temperature": 1, "seed": 5}
        told = HTTP.post(f"{running.url}/v1/chat/completions", json=chat).json()
        assert told["usage"]["completion_tokens"] <= 8, "a request without a limit gets that of the server"


def test_requests_beyond_queue_and_concurrency_are_refused() -> None:
    given = settings(max_concurrent_requests=1, max_queue=1)
    with running_server(settings_given=given) as running:
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(post(running))) for _ in range(2)]
        with paused(running):
            for number, thread in enumerate(threads, 1):
                thread.start()
                wait_for(lambda number=number: running.server.num_active == number)
            refused = post(running)
        assert (refused.status_code, code_of(refused)) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert running.server.num_active == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_takes_no_place(stream: bool) -> None:
    with running_server(settings_given=settings(max_concurrent_requests=1)) as running:
        first = threading.Thread(target=post, args=(running,))
        with paused(running):
            first.start()
            wait_for(lambda: running.server.gate.num_running == 1)
            leaving = send(running, "/v1/completions", body(stream=stream))
            wait_for(lambda: running.server.gate.num_waiting == 1)
            leaving.close()
            wait_for(lambda: running.server.gate.num_waiting == 0)
            wait_for(lambda: running.server.requests.num_disconnected == 1)
            assert ("/v1/completions", NAME, 499) in running.server.requests.by_status
        first.join()


def test_every_text_and_every_prompt_takes_a_place() -> None:
    with running_server(settings_given=settings(max_concurrent_requests=5)) as running:
        gate = running.server.gate
        answers: list[int] = []
        requests: list[dict[str, Any]] = [{"n": 2, "prompt": ["ab", "cd"]}, {"n": 2}]
        threads = [
            threading.Thread(
                target=lambda given=given: answers.append(post(running, temperature=1, **given).status_code)
            )
            for given in requests
        ]
        with paused(running):
            for number, thread in enumerate(threads, 1):
                thread.start()
                wait_for(lambda number=number: running.server.num_active == number)
            assert (gate.num_running, gate.num_places, gate.num_waiting) == (1, 4, 1)
            found = HTTP.get(f"{running.url}/draftree/status").json()["queue"]
            assert (found["running"], found["waiting"], found["places"], found["max_places"]) == (1, 1, 4, 5)
            assert "draftree_places_taken 4.0" in HTTP.get(f"{running.url}/metrics").text
        for thread in threads:
            thread.join()
        assert answers == [200, 200]
        wait_for(lambda: gate.num_places == 0)


ONE_KEY = "alice: sk-alice-1234\n"


@pytest.mark.parametrize(("keys", "priority"), [(None, -5), (ONE_KEY, -5), (f"{ONE_KEY}bob: sk-bob-12345\n", 0)])
def test_the_engine_gets_priorities_of_a_single_key_only(tmp_path: Path, keys: str | None, priority: int) -> None:
    options = {}
    if keys is not None:
        (tmp_path / "keys").write_text(keys)
        options = {"api_key_file": str(tmp_path / "keys")}
    headers = {"Authorization": "Bearer sk-alice-1234"}
    with running_server(settings_given=settings(**options)) as running:
        seen: list[int] = []
        running.llm.on_round(lambda record: seen.extend(each.priority for each in running.llm.llm.engine.running))
        assert post(running, headers, priority=-5).status_code == 200
    assert set(seen) == {priority}


def test_a_reader_of_rounds_beyond_the_limit_is_refused() -> None:
    with running_server(settings_given=settings(max_round_readers=1)) as running:
        url = f"{running.url}/draftree/rounds"
        with HTTP.stream("GET", url) as reader:
            lines = reader.iter_lines()  # closes the response when it is released
            assert next(lines) == ": rounds"
            refused = HTTP.get(url)
            assert (refused.status_code, code_of(refused)) == (429, "too_many_readers")
            assert int(refused.headers["retry-after"]) >= 1
        wait_for(lambda: running.server.rounds.num_readers == 0)
        with HTTP.stream("GET", url) as reader:
            assert reader.status_code == 200


def test_the_rounds_can_be_closed_to_all_readers() -> None:
    with running_server(settings_given=settings(max_round_readers=0)) as running:
        assert HTTP.get(f"{running.url}/draftree/rounds").status_code == 429
