"""`draftree verify-server` as a process: a device goes on with the same text after the process was killed."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftree import LLM, SamplingParams
from draftree.cli import verify_server as command
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.serve.settings import ServerSettings
from draftree.serve.verify.settings import VerifySettings
from private_cache import private_cache
from serving import tiny_model, tiny_tokenizer


class Process:
    """A server process on one port, which can be started again."""

    def __init__(self, folder: Path, port: int, *, options: Sequence[str] = (), authority: str | None = None) -> None:
        self.url = f"{'http' if authority is None else 'https'}://127.0.0.1:{port}"
        self._folder, self._port, self._options, self._authority = folder, port, options, authority
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "draftree", "verify-server", f"tiny={self._folder}", "--draft", "none"]
        command += ["--port", str(self._port), "--kernels", "torch", "--dtype", "float32", "--threads", "1"]
        command += self._options
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, "the server runs"
        try:
            verify = True if self._authority is None else ssl.create_default_context(cafile=self._authority)
            return httpx.get(f"{self.url}/ready", verify=verify).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: int) -> int:
        os.kill(self.process.pid, number)
        return self.process.wait(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path)


def folder_of(tmp_path: Path) -> Path:
    """A folder with the tiny model."""
    tiny_model().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def wait_for(condition: Any) -> None:
    """A process imports torch first, which takes long on a busy machine."""
    pause = threading.Event()
    for _ in range(12000):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("in time")


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_killed_server_costs_a_pause(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_API_KEY", raising=False)
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True)
    expected = LLM(tiny_model(), tokenizer=tiny_tokenizer(), kernels="torch").generate("The quick brown", params)
    server, updates = Process(folder, free_port()), []
    try:
        wait_for(server.is_ready)

        def kill(update: Any) -> None:
            updates.append(update)
            if len(updates) == 4:
                server.end(signal.SIGKILL)
                server.start()
                wait_for(server.is_ready)

        llm = LLM(f"remote:{server.url}", "suffix,min=1", plan="fixed")
        found = llm.generate("The quick brown", params, on_update=kill)
        assert found[0].token_ids == expected[0].token_ids
        assert found[0].text == expected[0].text
        assert llm.model.link.latency.reopened == 1
        llm.model.disconnect()
        assert server.end(signal.SIGTERM) == 0, "a clean end"
    finally:
        server.process.kill()
        server.process.wait(60)


def test_options_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.delenv("DRAFTREE_API_KEYS", raising=False)
    monkeypatch.setattr(command, "fetch_and_run", lambda settings, keys, limits: found.append((settings, limits)) or 0)
    arguments = ["verify-server", "stories15m", "--draft", "none", "--max-sessions", "3", "--max-texts", "2"]
    arguments += ["--max-nodes", "16", "--max-rows", "99", "--lease", "7", "--park", "3", "--port", "0"]
    assert run(arguments) == 0
    (settings, limits) = found[0]
    assert isinstance(settings, ServerSettings)
    assert settings.port == 0
    assert limits == VerifySettings(max_sessions=3, max_texts=2, max_nodes=16, max_rows=99, lease=7.0, park=3.0)
    assert run(["verify-server", "stories15m", "--draft", "none"]) == 0
    assert found[1][1] == VerifySettings(), "the command has the defaults of the settings"


@pytest.mark.parametrize("given", [{"max_nodes": 65}, {"max_texts": 0}, {"lease": -1.0}, {"park": float("nan")}])
def test_wrong_limits_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(given))):
        VerifySettings(**given)
