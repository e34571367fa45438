"""`draftree verify-server` as a process: killed servers and killed devices, TLS, and options."""

from __future__ import annotations

import json
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import forked
from draftree import LLM, SamplingParams
from draftree.cli import verify_server as command
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, GenerationError
from draftree.serve import run as serving_run
from draftree.serve.pool import load_models
from draftree.serve.settings import ServerSettings, choose_models
from draftree.serve.verify import VerifySettings
from operated import free_port, wait_for
from private_cache import private_cache
from serving import HTTP, plain_llm, running_server, self_signed, tiny_model, tiny_tokenizer
from split_devices import SPLIT

PARAMS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 3, "ignore_eos": True}
PROMPT = "The quick brown"
HANGING = """
import sys, threading
from draftree import LLM, SamplingParams

def hang(update):
    print("update", flush=True)
    threading.Event().wait()

def device(draft):
    LLM(sys.argv[1], draft).generate("The quick brown", SamplingParams(max_tokens=60), on_update=hang)

threading.Thread(target=device, args=(None,)).start()
device("suffix,min=1")
"""
"""Two devices, one that drafts and one that reads, which stop for ever after their first tokens."""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_API_KEY", raising=False)
    monkeypatch.delenv("DRAFTREE_API_KEYS", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


class Process:
    """A server process on one port, which can be started again."""

    def __init__(
        self, folder: Path, options: Sequence[str], python: Sequence[str] | None, authority: Path | None
    ) -> None:
        port = free_port()
        self.url = f"{'http' if authority is None else 'https'}://127.0.0.1:{port}"
        self._verify: Any = True if authority is None else ssl.create_default_context(cafile=authority)
        self._arguments = ["-m", "draftree", "verify-server", f"tiny={folder}", "--draft", "none", *options]
        self._arguments += ["--port", str(port), "--dtype", "float32", "--threads", "1"]
        self.start(python)

    def start(self, python: Sequence[str] | None = None) -> None:
        command = [*(python or forked.python()), *self._arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self.is_ready)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, "the server runs"
        try:
            return httpx.get(f"{self.url}/ready", verify=self._verify).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait()

    def restart(self) -> None:
        self.end(signal.SIGKILL)
        self.start()

    def status(self) -> Any:
        return HTTP.get(f"{self.url}/draftree/status").json()


@contextmanager
def running(
    folder: Path, *options: str, python: Sequence[str] | None = None, authority: Path | None = None
) -> Iterator[Process]:
    server = Process(folder, options or ("--kernels", "torch"), python, authority)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def text_of(llm: LLM, **options: Any) -> list[int]:
    return list(llm.generate(PROMPT, SamplingParams(**PARAMS), **options)[0].token_ids)


def expected() -> list[int]:
    return text_of(plain_llm())


def test_a_killed_server_costs_a_pause(folder: Path) -> None:
    with running(folder) as server:
        for draft, options in (("suffix,min=1", {"plan": "fixed"}), (None, {})):
            updates = []

            def kill(update: Any, updates: list[Any] = updates) -> None:
                updates.append(update)
                if len(updates) == 1:
                    server.restart()

            llm = LLM(f"remote:{server.url}", draft, **options)
            assert text_of(llm, on_update=kill) == expected()
            assert draft is None or llm.model.link.latency.reopened == 1
            llm.model.disconnect()
        assert server.end(signal.SIGTERM) == 0, "a clean end"


def test_killed_devices_leave_no_session_and_no_slot(folder: Path) -> None:
    with running(folder, "--lease", "2", "--park", "1", "--max-sessions", "2", "--kernels", "torch") as server:
        device = subprocess.Popen(
            [*forked.python(), "-c", HANGING, f"remote:{server.url}"], stdout=subprocess.PIPE, text=True
        )
        assert device.stdout is not None
        try:
            assert [device.stdout.readline() for _ in range(2)] == ["update\n"] * 2
        finally:
            device.kill()
            device.communicate()
        wait_for(lambda: server.status()["verify"]["sessions"] == 0)
        shown = server.status()
        assert shown["verify"]["texts"] == 0
        assert shown["verify"]["expired"] >= 2
        assert all(model["running"] == model["waiting"] == 0 for model in shown["models"])
        devices = [LLM(f"remote:{server.url}", draft) for draft in ("suffix,min=1", None)]
        for llm in devices:  # both sessions are free again
            assert text_of(llm) == expected()
            llm.model.disconnect()
        assert server.end(signal.SIGTERM) == 0


def test_a_server_that_is_killed_during_a_round_and_stays_away_is_an_error(folder: Path) -> None:
    """The server is stopped after the first tokens of two devices, and killed when both wait for its reply."""
    # a launcher does not pass SIGSTOP on
    with running(folder, python=[sys.executable]) as server:
        url = f"remote:{server.url}?wait=1.5"
        devices = [LLM(url, "suffix,min=1", plan="fixed"), LLM(url, "none")]
        transports: list[Any] = [llm.model.link._transport for llm in devices]
        killers: list[threading.Thread] = []

        def stop() -> None:
            server.process.send_signal(signal.SIGSTOP)
            before = [each.bytes_up for each in transports]
            killers.append(threading.Thread(target=kill, args=(before,)))
            killers[0].start()

        def kill(before: list[int]) -> None:
            wait_for(lambda: all(each.bytes_up > count for each, count in zip(transports, before, strict=True)))
            server.end(signal.SIGKILL)

        meeting = threading.Barrier(2, action=stop)

        def write(llm: LLM) -> None:
            def meet(update: Any) -> None:
                if not killers:
                    meeting.wait(600)

            with pytest.raises(GenerationError, match=r"did not answer within 1\.5 s .*check that it runs"):
                # more than a server that writes alone can have sent with the first token
                llm.generate([PROMPT] * 4, SamplingParams(**PARAMS | {"max_tokens": 450}), on_update=meet)
            llm.engine.check_integrity()
            assert not llm.engine.running
            assert llm.model.num_open == 0

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, devices))
        killers[0].join()
        server.start(forked.python())
        for llm in devices:
            assert text_of(llm) == expected()
            llm.model.disconnect()


def completion(url: str, model: str) -> httpx.Response:
    return HTTP.post(f"{url}/v1/completions", json={"model": model, "prompt": PROMPT, **PARAMS})


def events_while(url: str, model: str, action: Any = None) -> list[Any]:
    """The data of a stream's events, during which something happens after the third."""
    body = {"model": model, "prompt": PROMPT, **PARAMS, "max_tokens": 400, "stream": True}
    events: list[Any] = []
    with HTTP.stream("POST", f"{url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 3 and action is not None:
                    action()
    assert line == "" or line == "data: [DONE]"
    return events


def test_a_server_in_front_of_a_verify_server_that_is_killed(folder: Path) -> None:
    """A served remote target: its clients get the same text after a restart, or an error where it stays away."""
    wanted = plain_llm().generate(PROMPT, SamplingParams(**PARAMS))[0].text
    with running(folder) as verifying:
        served = [f"patient=remote:{verifying.url}?wait=600", f"brief=remote:{verifying.url}?wait=1"]
        models = load_models(ServerSettings(models=choose_models(served, ["suffix,min=1"])))
        with running_server(models) as front:
            for model in ("patient", "brief"):
                assert completion(front.url, model).json()["choices"][0]["text"] == wanted
            whole = events_while(front.url, "patient")
            cut = events_while(front.url, "patient", verifying.restart)
            texts = [
                "".join(choice["text"] for event in events for choice in event["choices"]) for events in (whole, cut)
            ]
            assert texts[0] == texts[1] != ""
            *_, last = events_while(front.url, "brief", lambda: verifying.end(signal.SIGKILL))
            assert last["error"]["code"] == "verify_server_lost"
            refused = completion(front.url, "brief")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "verify_server_lost")
            assert int(refused.headers["retry-after"]) > 0
            shown = HTTP.get(f"{front.url}/draftree/status").json()
            assert all(model["running"] == model["waiting"] == 0 for model in shown["models"])
            verifying.start()
            assert completion(front.url, "brief").json()["choices"][0]["text"] == wanted
            verifying.end(signal.SIGKILL)


def test_a_killed_server_of_the_last_layers_costs_a_pause(
    split_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(**PARAMS)
    expected = LLM(str(split_folder), "none", dtype="float32").generate(PROMPT, params)[0].text
    with running(split_folder, "--split", str(SPLIT)) as server:
        for picks in ("device", "server"):
            updates: list[Any] = []

            def kill(update: Any, updates: list[Any] = updates) -> None:
                updates.append(update)
                if len(updates) == 4:
                    server.restart()

            name = f"remote:{server.url}?split={SPLIT}&weights={split_folder}&picks={picks}"
            llm = LLM(name, f"early-exit:{SPLIT}", plan="fixed", dtype="float32")
            assert llm.generate(PROMPT, params, on_update=kill)[0].text == expected
            assert llm.model.link.latency.reopened == 1
            llm.model.disconnect()
        options = ["--dtype", "float32", "--max-tokens", "40", "--temperature", "0.8", "--seed", "3"]
        shown = []
        for source, draft in ((str(split_folder), "none"), (name, f"early-exit:{SPLIT}")):
            assert run(["generate", source, PROMPT, *options, "--draft", draft]) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1]
        assert len(shown[0]) > 40
        assert server.end(signal.SIGTERM) == 0, "a clean end"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_the_command_serves_https(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = self_signed(tmp_path)
    options = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--kernels", "torch"]
    with running(folder, *options, authority=certificate) as server:
        llm = LLM(f"remote:{server.url}?ca={certificate}", "suffix,min=1")
        assert text_of(llm) == expected()
        llm.model.disconnect()
        assert run(["generate", f"remote:{server.url}", "The", "--max-tokens", "2"]) == 1
        assert "not trusted" in capsys.readouterr().err


def test_options_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[tuple[ServerSettings, VerifySettings]] = []
    monkeypatch.setattr(command, "fetch_and_run", lambda settings, keys, limits: passed.append((settings, limits)) or 0)
    arguments = ["verify-server", "stories15m", "--draft", "none"]
    options = ["--max-sessions", "3", "--max-texts", "2", "--max-nodes", "16", "--max-rows", "99", "--lease", "7"]
    assert run([*arguments, *options, "--park", "3", "--port", "0", "--split", "3"]) == 0
    assert passed[0][0].port == 0
    assert passed[0][1] == VerifySettings(
        max_sessions=3, max_texts=2, max_nodes=16, max_rows=99, lease=7.0, park=3.0, split=3
    )
    assert run(arguments) == 0
    assert passed[1][1] == VerifySettings(), "the command has the defaults of the settings"


@pytest.mark.parametrize(
    "options",
    [
        {"max_nodes": 65},
        {"max_texts": 0},
        {"lease": -1.0},
        {"park": float("nan")},
        {"split": -1},
        {"split": 1.5},
        {"split": True},
    ],
)
def test_wrong_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        VerifySettings(**options)


def test_a_server_without_layers_of_its_own_is_refused_before_weights_are_read(
    split_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving_run, "load_models", lambda settings: pytest.fail("weights were read"))
    assert run(["verify-server", f"tiny={split_folder}", "--draft", "none", "--port", "0", "--split", "4"]) == 1
    words = f"split=4, and model '{split_folder}' has 4 layers: give 1 to 3"
    assert words in " ".join(capsys.readouterr().err.split())


def test_offloaded_layers_are_not_divided(split_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = LLM(str(split_folder), "none", dtype="float32", kernels="torch").model
    kilobytes = ((split_folder / "model.safetensors").stat().st_size - 4 * whole.input_embedding().numel()) // 1000 - 10
    options = ["--draft", "none", "--port", "0", "--dtype", "float32", "--offload", f"{kilobytes}KB"]
    assert run(["verify-server", f"tiny={split_folder}", *options, "--split", "2"]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "'tiny' cannot be divided: offload reads them from a file: serve it without --split" in shown


def test_options_of_the_server_are_refused_without_layers_here() -> None:
    for options in ({"kernels": "torch"}, {"quantization": "int8"}):
        with pytest.raises(ConfigurationError, match="chosen on the server"):
            LLM("remote:http://127.0.0.1:9", None, **options)
    with pytest.raises(ConfigurationError, match="without split"):
        LLM("remote:http://127.0.0.1:9?weights=stories15m", None)
