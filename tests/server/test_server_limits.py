"""Limits of a running server: sizes, times, places and queue, and what takes them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from operated import body, code_of, paused, post, wait_for
from serving import NAME, running_server, send, settings


@pytest.mark.parametrize(
    ("options", "given", "status", "code"),
    [
        ({"max_body_bytes": 100}, {"prompt": "x" * 200}, 413, "body_too_large"),
        ({"max_prompt_tokens": 4}, {"prompt": "a b c d e f g h i j k l m n o p"}, 400, "context_length_exceeded"),
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
        told = httpx.post(f"{running.url}/v1/chat/completions", json=chat, timeout=60).json()
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
            thread.join(60)
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
        first.join(60)


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
            found = httpx.get(f"{running.url}/draftree/status").json()["queue"]
            assert (found["running"], found["waiting"], found["places"], found["max_places"]) == (1, 1, 4, 5)
            assert "draftree_places_taken 4.0" in httpx.get(f"{running.url}/metrics").text
        for thread in threads:
            thread.join(60)
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
        with httpx.stream("GET", url, timeout=60) as reader:
            lines = reader.iter_lines()  # closes the response when it is released
            assert next(lines) == ": rounds"
            refused = httpx.get(url)
            assert (refused.status_code, code_of(refused)) == (429, "too_many_readers")
            assert int(refused.headers["retry-after"]) >= 1
        wait_for(lambda: running.server.rounds.num_readers == 0)
        with httpx.stream("GET", url, timeout=60) as reader:
            assert reader.status_code == 200


def test_the_rounds_can_be_closed_to_all_readers() -> None:
    with running_server(settings_given=settings(max_round_readers=0)) as running:
        assert httpx.get(f"{running.url}/draftree/rounds").status_code == 429
