"""Health, logs, status, rounds, headers and garbage collections of a running server."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftree.serve.app import create_app
from draftree.serve.pool import ModelPool, ServedModel
from draftree.serve.records import configured_logs
from draftree.serve.run import Loading
from draftree.version import __version__
from operated import body, code_of, post, wait_for
from serving import ALIAS, HTTP, NAME, Running, running_server, serving, settings, tiny_async_llm


def test_health_readiness_and_version(server: Running) -> None:
    assert HTTP.get(f"{server.url}/health").json() == {"status": "ok"}
    assert HTTP.get(f"{server.url}/ready").json() == {"status": "ready"}
    assert HTTP.get(f"{server.url}/version").json() == {"version": __version__}
    for path in ("health", "ready", "version"):
        answer = HTTP.head(f"{server.url}/{path}")
        assert (answer.status_code, answer.content) == (200, b"")


def test_a_server_without_models_is_alive_but_not_ready() -> None:
    app = create_app(settings(), ModelPool())
    with serving(app) as url:
        assert HTTP.get(f"{url}/health").status_code == 200
        answer = HTTP.get(f"{url}/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        refused = HTTP.post(f"{url}/v1/completions", json=body())
        assert (refused.status_code, code_of(refused)) == (503, "loading")
        assert refused.headers["retry-after"]
        assert HTTP.get(f"{url}/metrics").status_code == 200
        app.state.server.open([ServedModel(NAME, tiny_async_llm())])
        assert HTTP.get(f"{url}/ready").status_code == 200
        assert HTTP.post(f"{url}/v1/completions", json=body()).status_code == 200


def test_a_server_whose_engine_failed_is_neither_alive_nor_ready() -> None:
    with running_server() as running:
        (model,) = running.pool

        def fail() -> None:
            raise SystemExit("the engine's thread ends")

        def actions() -> None:
            model.llm._driver._turn = fail  # type: ignore[method-assign]

        model.llm._driver.call(actions).result()
        wait_for(lambda: not model.llm.is_alive)
        for path in ("health", "ready"):
            answer = HTTP.get(f"{running.url}/{path}")
            assert (answer.status_code, answer.json()) == (503, {"status": "failed"})


def logged_request(**options: Any) -> str:
    stream = io.StringIO()
    given = settings(**options)
    with configured_logs(as_json=True, level="info", stream=stream), running_server(settings_given=given) as running:
        answer = post(running, prompt="a private prompt").json()
        wait_for(lambda: "/v1/completions" in stream.getvalue())
    (line,) = [line for line in stream.getvalue().splitlines() if "/v1/completions" in line]
    found = json.loads(line)
    assert found["completion_tokens"] == answer["usage"]["completion_tokens"] == 8
    assert (found["response_id"], found["model"], found["draft"]) == (answer["id"], NAME, "ngram")
    assert found["first_token_seconds"] <= found["seconds"]
    if options:
        assert found["texts"] == [answer["choices"][0]["text"]]
    return line


def test_prompts_and_texts_are_logged_on_request_only() -> None:
    assert "a private prompt" not in logged_request()
    assert "a private prompt" in logged_request(log_prompts=True)


def test_refused_requests_are_logged_with_their_code() -> None:
    stream = io.StringIO()
    with configured_logs(as_json=True, level="info", stream=stream), running_server() as running:
        post(running, model="unknown")
        post(running, tempreture=1)
        post(running, stream=True, temperature=-1)
        wait_for(lambda: len(stream.getvalue().splitlines()) >= 3)
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(one["status"], "error" in one) for one in found] == [(404, True), (400, True), (400, True)]


def test_the_status_shows_models_and_queue(server: Running) -> None:
    post(server)
    found = HTTP.get(f"{server.url}/draftree/status").json()
    (model,) = found["models"]
    assert {name: model[name] for name in ("name", "aliases", "drafts", "running", "waiting")} == {
        "name": NAME,
        "aliases": [ALIAS],
        "drafts": ["ngram"],
        "running": 0,
        "waiting": 0,
    }
    assert model["context"] == 512
    assert model["dtype"] == "float32"
    assert model["kernels"] in ("torch", "native") or model["kernels"]
    assert model["tokens_per_second"] > 0
    assert model["acceptance_length"] >= 1
    assert isinstance(model["explain"], str)
    assert found["queue"] == {"running": 0, "waiting": 0, "places": 0, "max_places": 32, "max_waiting": 256}
    assert found["is_ready"] is True


def test_a_clock_that_is_set_back_changes_no_duration(monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    ticks = itertools.count(2_000_000_000, -1000)
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    fields = {"input": "hello", "text": {"format": {"type": "json_schema", "name": "one", "schema": {"const": 1}}}}
    answer = HTTP.post(f"{server.url}/v1/responses", json={"model": NAME, **fields}).json()
    assert answer["status"] == "completed"
    assert answer["completed_at"] >= answer["created_at"]
    assert 0 < HTTP.get(f"{server.url}/draftree/status").json()["uptime_seconds"] < 1e6


def test_rounds_are_streamed_without_text(server: Running) -> None:
    with HTTP.stream("GET", f"{server.url}/draftree/rounds") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        assert next(lines) == ": rounds"
        answer = post(server).json()
        found: list[Any] = []
        while sum(one["num_written"] for each in found for one in each["sequences"]) < 8:
            line = next(lines)
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
    assert {each["model"] for each in found} == {NAME}
    assert {one["request_id"] for each in found for one in each["sequences"]} == {answer["id"]}
    assert set(found[0]) == {"number", "model", "time", "seconds", "rows", "sequences"}
    assert [each["number"] for each in found] == list(range(found[0]["number"], found[0]["number"] + len(found)))


def test_requests_have_ids_and_security_headers(server: Running) -> None:
    answer = HTTP.get(f"{server.url}/health", headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "server" not in answer.headers or "uvicorn" not in HTTP.get(f"{server.url}/").text
    page = HTTP.get(f"{server.url}/")
    assert page.headers["content-security-policy"].count("default-src") == 1


def test_no_other_origin_may_call_by_default(server: Running) -> None:
    answer = HTTP.get(f"{server.url}/v1/models", headers={"Origin": "https://example.org"})
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_listed_origins_may_call(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-alice-1234\n")
    given = settings(cors_origins=("https://example.org",), api_key_file=str(keys))
    preflight = {
        "Origin": "https://example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with running_server(settings_given=given) as running:
        url = f"{running.url}/v1/chat/completions"
        allowed = HTTP.options(url, headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        other = HTTP.options(url, headers=preflight | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_client_that_sends_no_request_head_is_not_waited_for_by_others(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        assert post(server).status_code == 200


def test_objects_that_exist_when_the_models_are_loaded_are_exempt_from_collections() -> None:
    opened: list[Sequence[ServedModel]] = []
    server: Any = SimpleNamespace(server=SimpleNamespace(open=opened.append), should_exit=False)
    loading = Loading(list, server)

    async def ready() -> None:
        is_ready = asyncio.Event()
        loading.start(is_ready.set)
        await is_ready.wait()

    before = gc.get_freeze_count()
    try:
        asyncio.run(ready())
        num_exempt = gc.get_freeze_count() - before
    finally:
        gc.unfreeze()  # this process goes on
    assert opened == [[]]
    assert loading.error is None
    assert num_exempt > 10_000, "the modules that are imported here"
