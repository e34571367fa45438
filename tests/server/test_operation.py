"""Keys, limits, health, status, rounds and headers of a running server."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftree.serve.app import create_app
from draftree.serve.logs import configured_logs
from draftree.serve.pool import ModelPool, ServedModel
from draftree.serve.served import ModelChoice
from draftree.serve.settings import ServerSettings
from draftree.version import __version__
from serving import ALIAS, NAME, Running, running_server, serving, settings, tiny_async_llm

ALICE, BOB = {"Authorization": "Bearer sk-alice-1234"}, {"Authorization": "Bearer sk-bob-12345"}
OTHER = "other"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two models and two keys, of which one may use one model only."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"alice: sk-alice-1234\nbob: sk-bob-12345 {ALIAS}\n", encoding="utf-8")
    choices = (ModelChoice(NAME, "tiny", (ALIAS,)), ModelChoice(OTHER, "tiny"))
    models = [ServedModel(NAME, tiny_async_llm(), (ALIAS,)), ServedModel(OTHER, tiny_async_llm())]
    given = ServerSettings(models=choices, api_key_file=str(keys))
    with running_server(models, settings_given=given) as running:
        yield running


def body(**given: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "ab ab ab", "max_tokens": 8, "temperature": 0} | given


def post(server: Running, headers: dict[str, str] | None = None, **given: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body(**given), headers=headers, timeout=60)


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def test_health_readiness_and_version(server: Running) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}


def test_a_server_without_models_is_alive_but_not_ready() -> None:
    app = create_app(settings(), ModelPool())
    with serving(app) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        answer = httpx.get(f"{url}/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        refused = httpx.post(f"{url}/v1/completions", json=body())
        assert (refused.status_code, code_of(refused)) == (503, "loading")
        assert refused.headers["retry-after"]
        assert httpx.get(f"{url}/metrics").status_code == 200
        app.state.server.open([ServedModel(NAME, tiny_async_llm())])
        assert httpx.get(f"{url}/ready").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=body(), timeout=60).status_code == 200


def test_a_server_whose_engine_failed_is_neither_alive_nor_ready() -> None:
    with running_server() as running:
        (model,) = running.pool

        def fail() -> None:
            raise SystemExit("the engine's thread ends")

        def actions() -> None:
            model.llm._driver._turn = fail  # type: ignore[method-assign]

        model.llm._driver.call(actions).result(60)
        wait_for(lambda: not model.llm.is_alive)
        for path in ("health", "ready"):
            answer = httpx.get(f"{running.url}/{path}")
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
    found = httpx.get(f"{server.url}/draftree/status").json()
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
    assert found["queue"] == {"running": 0, "waiting": 0, "max_running": 32, "max_waiting": 256}
    assert found["is_ready"] is True
    assert found["uptime_seconds"] > 0


def test_rounds_are_streamed_without_text(server: Running) -> None:
    with httpx.stream("GET", f"{server.url}/draftree/rounds", timeout=60) as stream:
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


def test_without_a_key_only_public_paths_answer(guarded: Running) -> None:
    paths = {"/": 200, "/health": 200, "/ready": 200, "/version": 200}
    paths |= dict.fromkeys(("/metrics", "/v1/models", "/draftree/status", "/draftree/rounds", "/openapi.json"), 401)
    for path, status in paths.items():
        with httpx.stream("GET", guarded.url + path) as answer:
            assert answer.status_code == status, path
    refused = post(guarded)
    assert (refused.status_code, code_of(refused)) == (401, "missing_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    wrong = post(guarded, {"Authorization": "Bearer sk-wrong-key"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")


def test_a_key_sees_and_uses_its_models_only(guarded: Running) -> None:
    assert post(guarded, ALICE, model=OTHER).status_code == 200
    assert post(guarded, BOB, model=ALIAS).status_code == 200
    refused = post(guarded, BOB, model=OTHER)
    assert (refused.status_code, code_of(refused)) == (404, "model_not_found")
    assert OTHER not in refused.json()["error"]["message"].partition("served:")[2]
    names = [one["id"] for one in httpx.get(f"{guarded.url}/v1/models", headers=BOB).json()["data"]]
    assert names == [NAME, ALIAS]
    models = httpx.get(f"{guarded.url}/draftree/status", headers=BOB).json()["models"]
    assert [one["name"] for one in models] == [NAME]


def test_a_key_gets_no_rounds_of_other_models(guarded: Running) -> None:
    with httpx.stream("GET", f"{guarded.url}/draftree/rounds", headers=BOB, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": rounds"
        post(guarded, ALICE, model=OTHER)
        post(guarded, ALICE, model=NAME)
        first = next(line for line in lines if line.startswith("data: "))
    assert json.loads(first.removeprefix("data: "))["model"] == NAME


def test_requests_have_ids_and_security_headers(server: Running) -> None:
    answer = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "server" not in answer.headers or "uvicorn" not in httpx.get(f"{server.url}/").text
    page = httpx.get(f"{server.url}/")
    assert page.headers["content-security-policy"].count("default-src") == 1


def test_no_other_origin_may_call_by_default(server: Running) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://example.org"})
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
        allowed = httpx.options(url, headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        other = httpx.options(url, headers=preflight | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


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


@contextmanager
def paused(running: Running) -> Iterator[None]:
    """The engine waits in its first round until the block ends."""
    (model,) = running.pool
    goes_on = threading.Event()
    remove = model.llm.on_round(lambda record: goes_on.wait(60) and None)
    try:
        yield
    finally:
        goes_on.set()
        remove()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_takes_no_place(stream: bool) -> None:
    with running_server(settings_given=settings(max_concurrent_requests=1)) as running, paused(running):
        first = threading.Thread(target=post, args=(running,))
        first.start()
        wait_for(lambda: running.server.gate.num_running == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json=body(stream=stream), timeout=0.5)
        wait_for(lambda: running.server.gate.num_waiting == 0)
        wait_for(lambda: running.server.requests.num_disconnected == 1)
        assert ("/v1/completions", NAME, 499) in running.server.requests.by_status
    first.join(60)


def test_a_client_that_sends_no_request_head_is_not_waited_for_by_others(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        assert post(server).status_code == 200


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "in time"
        time.sleep(0.01)
