"""`draftree watch` against a real server."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from draftree.cli.main import run
from draftree.cli.watch import PHASE_STYLES, RoundListener, ServerClient
from draftree.core.types import RoundRecord
from operated import wait_for
from serving import NAME, Running


class Steps:
    """Rounds of a server that run while `watch` listens; they are in place of its interval.

    Args:
        server: its engine waits after every round.
    """

    def __init__(self, server: Running) -> None:
        self._server, self._rounds, self._is_over = server, threading.Semaphore(0), threading.Event()
        self._received: list[Any] = []

    def __call__(self, record: RoundRecord) -> None:
        if not self._is_over.is_set():
            self._rounds.acquire()

    def listener(self, client: ServerClient, add: Callable[[Any], None]) -> RoundListener:
        """As `RoundListener`."""

        def receive(values: Any) -> None:
            add(values)
            self._received.append(values)

        wait_for(lambda: not self._server.server.rounds.num_readers)
        self._received.clear()
        return RoundListener(client, receive)

    def sleep(self, seconds: float) -> None:
        """As `time.sleep`: until three rounds were received."""
        wait_for(lambda: self._server.server.rounds.num_readers)
        for _ in range(3):
            self._rounds.release()
        wait_for(lambda: len(self._received) >= 3)

    def end(self) -> None:
        """Wait no longer."""
        self._is_over.set()
        self._rounds.release()


def test_a_snapshot_of_a_busy_server(
    server: Running, http: httpx.Client, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, steps = importlib.import_module("draftree.cli.watch"), Steps(server)
    monkeypatch.setattr(command, "RoundListener", steps.listener)
    monkeypatch.setattr(command, "time", steps)
    body = {"model": NAME, "prompt": "The fox", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    busy = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": body})
    remove = server.llm.on_round(steps)
    busy.start()
    try:
        assert run(["watch", server.url, "--once", "--json", "--interval", "1"]) == 0
        printed = capfd.readouterr().out
        assert run(["watch", f"{server.url}/v1", "--once", "--interval", "0.3"]) == 0
    finally:
        steps.end()
        busy.join()
        remove()
    found = json.loads(printed)
    (model,) = found["status"]["models"]
    assert (model["name"], model["running"], model["drafts"]) == (NAME, 1, ["ngram"])
    assert model["tokens_per_second"] is not None
    assert model["acceptance_length"] >= 1
    assert len(found["rounds"]) >= 3
    for one in found["rounds"]:
        assert one["model"] == NAME
        (row,) = one["sequences"]
        assert row["num_written"] >= row["num_accepted"]
        assert 0 < sum(one["seconds"][phase] for phase in PHASE_STYLES) <= 1.001 * one["seconds"]["total"]
    shown = capfd.readouterr().out
    assert "running 1, waiting 0 of 256, places 1 of 32" in shown
    assert " ms " in shown
