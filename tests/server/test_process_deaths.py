"""Processes that are killed in the middle of a text: the server frees what the device held, the device goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_verify_process import Process, folder_of, free_port, wait_for

from draftree import LLM, SamplingParams
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
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
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
