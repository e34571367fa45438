"""`draftree watch` against a real server."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from draftree.cli.main import run
from draftree.cli.watching.facts import PHASES, RoundFacts, ServerFacts
from serving import NAME, Running, slow_rounds


def test_a_snapshot_of_a_busy_server(server: Running, http: httpx.Client, capfd: pytest.CaptureFixture[str]) -> None:
    body = {"model": NAME, "prompt": "The fox", "max_tokens": 60, "temperature": 0}
    with slow_rounds(server.llm, seconds=0.05):
        busy = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": body})
        busy.start()
        assert run(["watch", server.url, "--once", "--json", "--interval", "1"]) == 0
        printed = capfd.readouterr().out
        assert run(["watch", f"{server.url}/v1", "--once", "--interval", "0.3"]) == 0
        busy.join()
    found = json.loads(printed)
    (model,) = ServerFacts.of(found["status"]).models
    assert (model.name, model.running, model.drafts) == (NAME, 1, ("ngram",))
    assert model.tokens_per_second is not None
    assert model.acceptance_length is not None
    assert model.acceptance_length >= 1
    rounds = [RoundFacts.of(values) for values in found["rounds"]]
    assert len(rounds) >= 3
    for one in rounds:
        assert one.model == NAME
        assert len(one.rows) == 1
        assert one.rows[0].num_written >= one.rows[0].num_accepted
        assert 0 < sum(one.seconds[phase] for phase in PHASES) <= 1.001 * one.total_seconds
    shown = capfd.readouterr().out
    assert "running 1, waiting 0 of 256, places 1 of 32" in shown
    assert " ms " in shown
