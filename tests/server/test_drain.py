"""A real process: the line that announces it, SIGTERM and Ctrl-C, the drain, logs, loading errors."""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path

import httpx
import pytest

from cli_samples import save_tiny_model
from operated import wait_for
from serve_process import process
from serving import HTTP

LONG = 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", chat=True, context=LONG + 100)


class Reader(threading.Thread):
    """A client that streams a long text."""

    def __init__(self, url: str, count: int) -> None:
        super().__init__(daemon=True)
        self.url, self.count = url, count
        self.text = ""
        self.has_begun, self.is_done = threading.Event(), False
        self.failure: Exception | None = None
        self.start()
        self.has_begun.wait()

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "a", "max_tokens": self.count, "ignore_eos": True, "stream": True}
        try:
            with HTTP.stream("POST", f"{self.url}/v1/completions", json=body | {"seed": 3}) as answer:
                for line in answer.iter_lines():
                    self.is_done = self.is_done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        self.text += json.loads(line[6:])["choices"][0]["text"]
                        self.has_begun.set()
        except httpx.HTTPError as error:
            self.failure = error
            self.has_begun.set()


def listens(url: str) -> bool:
    """Whether a server accepts connections."""
    try:
        HTTP.get(f"{url}/health")
    except httpx.TransportError:
        return False
    return True


def test_sigterm_finishes_running_requests_and_exits_with_0(folder: Path, tmp_path: Path) -> None:
    with process(folder, tmp_path / "log") as running:
        assert re.fullmatch(
            r"serving tiny \(suffix, prediction\) at http://127\.0\.0\.1:\d+/v1, no API key\n", running.line
        )
        assert HTTP.get(f"{running.url}/ready").status_code == 200
        reader = Reader(running.url, 1500)
        with httpx.Client() as kept:
            kept.get(f"{running.url}/health")
            with HTTP.stream("GET", f"{running.url}/draftree/rounds") as rounds:
                running.process.send_signal(signal.SIGTERM)
                lines = list(rounds.iter_lines())
            assert lines[0] == ": rounds", "its readers do not hold the drain"
        assert running.process.wait() == 0
        reader.join()
        assert reader.is_done, reader.failure
        requests = [one for one in running.lines() if one["logger"] == "draftree.serve.requests"]
        (finished,) = [one for one in requests if one["path"] == "/v1/completions"]
        assert (finished["status"], finished["completion_tokens"]) == (200, 1500)
        assert "tiny" in json.dumps(finished)
        assert "Traceback" not in running.log.read_text()
        with pytest.raises(httpx.ConnectError):
            HTTP.get(f"{running.url}/health")


def test_requests_that_outlast_the_drain_are_ended_with_the_status_of_the_signal(folder: Path, tmp_path: Path) -> None:
    with process(folder, tmp_path / "log", "--drain-timeout", "0.3") as running:
        reader = Reader(running.url, LONG)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait() == 128 + signal.SIGTERM
        reader.join()
        assert not reader.is_done
        assert any("did not finish in time" in one.get("message", "") for one in running.lines())


def test_a_second_ctrl_c_ends_at_once(folder: Path, tmp_path: Path) -> None:
    with process(folder, tmp_path / "log", "--drain-timeout", "60") as running:
        reader = Reader(running.url, LONG)
        running.process.send_signal(signal.SIGINT)
        wait_for(lambda: not listens(running.url))
        assert running.process.poll() is None, "it waits for the running request"
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait() == 128 + signal.SIGINT
        reader.join()
        assert not reader.is_done
