"""Processes that are killed in the middle of a text: the text continues, or fails with a clear error; no slot leaks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_verify_process import Process, folder_of, free_port, wait_for

from draftree import LLM, SamplingParams
from draftree.core.errors import GenerationError
from private_cache import private_cache
from serving import tiny_model, tiny_tokenizer

PARAMS = {"max_tokens": 60, "temperature": 0.8, "seed": 3, "ignore_eos": True}
HANGING = """
import sys, threading
from draftree import LLM, SamplingParams
llm = LLM(sys.argv[1], None if sys.argv[2] == "none" else sys.argv[2])
def update(found):
    print("update", flush=True)
    threading.Event().wait()
llm.generate("The quick brown", SamplingParams(**eval(sys.argv[3])), on_update=update)
"""
"""A device that stops for ever after its first tokens."""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_API_KEY", raising=False)


def expected() -> list[int]:
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer(), kernels="torch")
    return list(llm.generate("The quick brown", SamplingParams(**PARAMS))[0].token_ids)


def status(server: Process) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/draftree/status", timeout=60).json()
    return found


@pytest.mark.parametrize("draft", ["suffix,min=1", "none"])
def test_a_killed_device_leaves_no_session_and_no_slot(tmp_path: Path, draft: str) -> None:
    options = ["--lease", "8", "--park", "1", "--max-sessions", "1"]
    server = Process(folder_of(tmp_path), free_port(), options=options)
    device = None
    try:
        wait_for(server.is_ready)
        command = [sys.executable, "-c", HANGING, f"remote:{server.url}", draft, repr(PARAMS)]
        device = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert device.stdout is not None
        assert device.stdout.readline() == "update\n"
        device.kill()
        device.communicate(timeout=60)
        wait_for(lambda: status(server)["verify"]["sessions"] == 0)
        shown = status(server)
        assert shown["verify"]["texts"] == 0
        assert shown["verify"]["expired"] >= 1
        assert all(model["running"] == model["waiting"] == 0 for model in shown["models"])
        # the only session is free again
        llm = LLM(f"remote:{server.url}", None if draft == "none" else draft)
        assert list(llm.generate("The quick brown", SamplingParams(**PARAMS))[0].token_ids) == expected()
        llm.model.disconnect()
        assert server.end(signal.SIGTERM) == 0
    finally:
        for process in (server.process, device):
            if process is not None:
                process.kill()
                process.communicate(timeout=60)


def test_a_killed_server_costs_a_reading_device_a_pause(tmp_path: Path) -> None:
    server, updates = Process(folder_of(tmp_path), free_port()), []
    try:
        wait_for(server.is_ready)

        def kill(update: Any) -> None:
            updates.append(update)
            if len(updates) == 1:
                server.end(signal.SIGKILL)
                server.start()
                wait_for(server.is_ready)

        llm = LLM(f"remote:{server.url}")
        found = llm.generate("The quick brown", SamplingParams(**PARAMS), on_update=kill)
        assert list(found[0].token_ids) == expected()
        llm.model.disconnect()
        assert server.end(signal.SIGTERM) == 0
    finally:
        server.process.kill()
        server.process.wait(60)


def kill_in_flight(server: Process, llm: LLM) -> threading.Thread:
    """Stop the server, and kill it as soon as the device has sent its next frame: the device waits for the reply."""
    server.process.send_signal(signal.SIGSTOP)
    transport: Any = llm.model.link._transport
    before = transport.bytes_up

    def kill() -> None:
        wait_for(lambda: transport.bytes_up > before)
        server.end(signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("draft", ["suffix,min=1", "none"])
def test_a_server_that_is_killed_during_a_round_and_stays_away_is_an_error(tmp_path: Path, draft: str) -> None:
    server, killers = Process(folder_of(tmp_path), free_port()), list[threading.Thread]()
    try:
        wait_for(server.is_ready)
        options: dict[str, Any] = {} if draft == "none" else {"plan": "fixed"}
        llm = LLM(f"remote:{server.url}?wait=1.5", None if draft == "none" else draft, **options)

        def kill(update: Any) -> None:
            if not killers:
                killers.append(kill_in_flight(server, llm))

        with pytest.raises(GenerationError, match=r"did not answer within 1\.5 s .*check that it runs"):
            # more than a server that writes alone can have sent with the first token
            llm.generate(["The quick brown"] * 4, SamplingParams(**PARAMS | {"max_tokens": 450}), on_update=kill)
        killers[0].join()
        llm.engine.check_integrity()
        assert not llm.engine.running
        assert llm.model.num_open == 0
        server.start()
        wait_for(server.is_ready)
        assert list(llm.generate("The quick brown", SamplingParams(**PARAMS))[0].token_ids) == expected()
        llm.model.disconnect()
        assert server.end(signal.SIGTERM) == 0
    finally:
        server.process.kill()
        server.process.wait(60)


def completion(url: str, **options: Any) -> httpx.Response:
    body = {"model": "far", "prompt": "The quick brown", **PARAMS, **options}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def events_while(url: str, action: Any) -> list[str]:
    """The events of a stream, during which something happens after the third."""
    body = {"model": "far", "prompt": "The quick brown", **PARAMS, "max_tokens": 400, "stream": True}
    found: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            found += [line] if line.startswith("data: ") else []
            if len(found) == 3 and action is not None:
                action()
                action = None
    return found


def test_a_server_in_front_of_a_verify_server_that_is_killed(tmp_path: Path) -> None:
    """`draftree serve` with a remote target: its clients get an error, or the same text after a restart."""
    far = Process(folder_of(tmp_path), free_port())
    front = None
    try:
        wait_for(far.is_ready)
        command = [sys.executable, "-m", "draftree", "serve", f"far=remote:{far.url}?wait=60", "--port", "0"]
        front = subprocess.Popen([*command, "--draft", "suffix,min=1"], stdout=subprocess.PIPE, text=True)
        assert front.stdout is not None
        url = front.stdout.readline().split(" at ")[1].split("/v1")[0]
        plain = LLM(tiny_model(), tokenizer=tiny_tokenizer(), kernels="torch")
        wanted = plain.generate("The quick brown", SamplingParams(**PARAMS))[0].text
        assert completion(url).json()["choices"][0]["text"] == wanted

        def restart() -> None:
            far.end(signal.SIGKILL)
            far.start()

        whole, cut = events_while(url, None), events_while(url, restart)
        assert [piece_of(event) for event in whole[:-1]] != []
        assert "".join(map(piece_of, cut)) == "".join(map(piece_of, whole))
        far.end(signal.SIGKILL)
        front.terminate()
        assert front.wait(60) == 0
    finally:
        for process in (far.process, front):
            if process is not None:
                process.kill()
                process.communicate(timeout=60)


def piece_of(event: str) -> str:
    """The text of an event of a stream."""
    content = event.removeprefix("data: ")
    found = {} if content == "[DONE]" else json.loads(content)
    assert "error" not in found, found
    return "".join(choice["text"] for choice in found.get("choices", []))


def test_a_server_in_front_of_a_verify_server_that_stays_away(tmp_path: Path) -> None:
    far = Process(folder_of(tmp_path), free_port())
    front = None
    try:
        wait_for(far.is_ready)
        command = [sys.executable, "-m", "draftree", "serve", f"far=remote:{far.url}?wait=1", "--port", "0"]
        front = subprocess.Popen([*command, "--draft", "suffix,min=1"], stdout=subprocess.PIPE, text=True)
        assert front.stdout is not None
        url = front.stdout.readline().split(" at ")[1].split("/v1")[0]
        *_, last, done = events_while(url, lambda: far.end(signal.SIGKILL))
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "verify_server_lost"
        refused = completion(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "verify_server_lost")
        assert int(refused.headers["retry-after"]) > 0
        shown = httpx.get(f"{url}/draftree/status", timeout=60).json()
        assert all(model["running"] == model["waiting"] == 0 for model in shown["models"])
        far.start()
        wait_for(far.is_ready)
        wanted = LLM(tiny_model(), tokenizer=tiny_tokenizer(), kernels="torch")
        text = wanted.generate("The quick brown", SamplingParams(**PARAMS))[0].text
        assert completion(url).json()["choices"][0]["text"] == text
    finally:
        for process in (far.process, front):
            if process is not None:
                process.kill()
                process.communicate(timeout=60)
