"""Answers of replicas: of an app in the process of a replica, and of all replicas merged into one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from draftree.serve.ray.exposition import merged_metrics
from draftree.serve.ray.status import merged_status
from draftree.serve.ray.wire import AnswerStart, HttpRequest, Part, call_app
from scripted_replicas import ask, scope_of, started


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


def status(running: int, tokens: float, length: float | None, *, ready: bool = True) -> str:
    model = {"name": "m", "drafts": ["ngram"], "running": running, "waiting": 1, "explain": f"reason {running}"}
    model |= {"tokens_per_second": tokens, "acceptance_length": length, "acceptance_rate": length and length / 10}
    queue = {"running": running, "waiting": 2, "places": 2 * running, "max_places": 32, "max_waiting": 256}
    rest = {"is_ready": ready, "uptime_seconds": 10.0 * running, "version": "1"}
    return json.dumps({"models": [model], "queue": queue} | rest)


def test_the_status_of_all_replicas_is_summed() -> None:
    texts = {"a": status(1, 30.0, 2.0, ready=False), "b": status(3, 10.0, 4.0), "c": status(0, 0.0, None)}
    found = json.loads(merged_status(texts))
    (model,) = found["models"]
    assert (model["running"], model["waiting"], model["tokens_per_second"]) == (4, 3, 40.0)
    assert model["acceptance_length"] == pytest.approx(2.5)
    assert model["acceptance_rate"] == pytest.approx(0.25)
    assert (model["drafts"], model["explain"]) == (["ngram"], "reason 1")
    assert found["queue"] == {"running": 4, "waiting": 6, "places": 8, "max_places": 96, "max_waiting": 768}
    assert (found["is_ready"], found["uptime_seconds"], found["replicas"]) == (True, 30.0, ["a", "b", "c"])
    assert json.loads(merged_status({"c": status(0, 0.0, None)}))["models"][0]["acceptance_length"] is None


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_status_is_that_of_all_replicas_or_the_refusal_of_one(is_allowed: bool) -> None:
    class Two:
        async def everywhere(self, request: HttpRequest) -> list[list[Part]]:
            second = [started(200 if is_allowed else 401, replica="b"), status(2, 1.0, 2.0).encode()]
            return [[started(200, replica="a"), status(1, 1.0, 2.0).encode()], second]

    code, _, body = ask(Two(), b"", path="/draftree/status", method="GET")
    assert code == (200 if is_allowed else 401)
    assert json.loads(body)["queue"]["running"] == (3 if is_allowed else 2)
