"""`draftree verify-server --split N` as a process: a device goes on with the same text after it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_verify_process import Process, free_port, wait_for

from draftree import LLM, SamplingParams
from draftree.cli import verify_server as command
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.serve import run as serving_run
from draftree.serve.verify.settings import VerifySettings
from private_cache import private_cache
from split_devices import SPLIT, split_folder


class SplitProcess(Process):
    """A server process that takes hidden states."""

    def start(self) -> None:
        command = [sys.executable, "-m", "draftree", "verify-server", f"tiny={self._folder}", "--draft", "none"]
        command += ["--port", str(self._port), "--dtype", "float32", "--threads", "1", "--split", str(SPLIT)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_killed_server_costs_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_API_KEY", raising=False)
    folder = split_folder(tmp_path)
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True)
    expected = LLM(str(folder), dtype="float32").generate("The quick brown", params)
    server = SplitProcess(folder, free_port())
    try:
        wait_for(server.is_ready)
        for options in ("picks=device", "picks=server"):
            updates: list[Any] = []

            def kill(update: Any, updates: list[Any] = updates) -> None:
                updates.append(update)
                if len(updates) == 4:
                    server.end(signal.SIGKILL)
                    server.start()
                    wait_for(server.is_ready)

            name = f"remote:{server.url}?split={SPLIT}&weights={folder}&{options}"
            llm = LLM(name, f"early-exit:{SPLIT}", plan="fixed", dtype="float32")
            found = llm.generate("The quick brown", params, on_update=kill)
            assert found[0].token_ids == expected[0].token_ids
            assert found[0].text == expected[0].text
            assert llm.model.link.latency.reopened == 1
            llm.model.disconnect()
        given = ["The quick brown", "--dtype", "float32", "--max-tokens", "40", "--temperature", "0.8", "--seed", "3"]
        assert run(["generate", str(folder), *given, "--draft", "none"]) == 0
        shown = capsys.readouterr().out
        assert len(shown) > 40
        assert run(["generate", name, *given, "--draft", f"early-exit:{SPLIT}"]) == 0
        assert capsys.readouterr().out == shown
        assert server.end(signal.SIGTERM) == 0, "a clean end"
    finally:
        server.process.kill()
        server.process.wait(60)


def test_the_option_reaches_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.delenv("DRAFTREE_API_KEYS", raising=False)
    monkeypatch.setattr(command, "fetch_and_run", lambda settings, keys, limits: found.append(limits) or 0)
    assert run(["verify-server", "stories15m", "--draft", "none", "--split", "3"]) == 0
    assert found == [VerifySettings(split=3)]
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigurationError, match="split"):
            VerifySettings(split=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("split", "message"), [(99, "has 4 layers: give 1 to 3"), (4, "has 4 layers: give 1 to 3")])
def test_a_server_without_layers_of_its_own_is_refused_before_weights_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    split: int,
    message: str,
) -> None:
    monkeypatch.delenv("DRAFTREE_API_KEYS", raising=False)
    folder = split_folder(tmp_path)
    monkeypatch.setattr(serving_run, "load_models", lambda settings: pytest.fail("weights were read"))
    assert run(["verify-server", f"tiny={folder}", "--draft", "none", "--port", "0", "--split", str(split)]) == 1
    assert f"split={split}, and model '{folder}' {message}" in " ".join(capsys.readouterr().err.split())


def test_offloaded_layers_are_not_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_API_KEYS", raising=False)
    folder = split_folder(tmp_path)
    whole = LLM(str(folder), dtype="float32", kernels="torch").model
    kilobytes = ((folder / "model.safetensors").stat().st_size - 4 * whole.input_embedding().numel()) // 1000 - 10
    options = ["--draft", "none", "--port", "0", "--dtype", "float32", "--offload", f"{kilobytes}KB"]
    assert run(["verify-server", f"tiny={folder}", *options, "--split", "2"]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "'tiny' cannot be divided: offload reads them from a file: serve it without --split" in shown


def test_options_of_the_server_are_refused_without_layers_here() -> None:
    for options in ({"kernels": "torch"}, {"quantization": "int8"}):
        with pytest.raises(ConfigurationError, match="chosen on the server"):
            LLM("remote:http://127.0.0.1:9", None, **options)
    with pytest.raises(ConfigurationError, match="without split"):
        LLM("remote:http://127.0.0.1:9?weights=stories15m", None)
