"""Learning while serving: persistence over restarts, scopes, metrics, unchanged texts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftree.core.errors import ConfigurationError
from draftree.serve.pool import ServedModel
from draftree.serve.ray.options import ReplicaOptions
from draftree.serve.run import warm_up
from draftree.serve.settings import ModelChoice, ServerSettings, choose_models
from serving import ALIAS, HTTP, NAME, Running, running_server, settings, tiny_async_llm

ALICE, BOB = {"Authorization": "Bearer sk-alice-1234"}, {"Authorization": "Bearer sk-bob-12345"}
BODY = {"model": NAME, "prompt": "ab ab ab ab ab", "max_tokens": 60, "seed": 3}


def learning(learn: str | None) -> list[ServedModel]:
    return [ServedModel(NAME, tiny_async_llm("suffix", plan="fixed:8", learn=learn), (ALIAS,))]


def written(server: Running, headers: dict[str, str] | None = None) -> tuple[str, int]:
    """The text of a request, and its number of rounds."""
    before = rounds_of(server)
    answer = HTTP.post(f"{server.url}/v1/completions", json=BODY, headers=headers)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"], rounds_of(server) - before


def rounds_of(server: Running) -> int:
    return server.server.meters[NAME].num_rounds


def metrics(server: Running, headers: dict[str, str] | None = None) -> dict[str, float]:
    text = HTTP.get(f"{server.url}/metrics", headers=headers).text
    families = text_string_to_metric_families(text)
    return {one.name: one.value for family in families for one in family.samples if "learn" in one.name}


def status(server: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = HTTP.get(f"{server.url}/draftree/status").json()["models"][0]["learned"]
    return found


def test_what_was_learned_persists_over_a_restart(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with running_server(learning(f"server,folder={tmp_path}")) as server:
            asyncio.run(warm_up(tuple(server.pool)))
            found.append(written(server))
    (first_text, first_rounds), (second_text, second_rounds) = found
    with running_server(learning(None)) as server:
        assert written(server) == (first_text, first_rounds)
    assert second_text == first_text
    assert second_rounds < first_rounds / 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_texts_of_one_key_do_not_speed_up_another(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("alice: sk-alice-1234\nbob: sk-bob-12345\n", encoding="utf-8")
    given = ServerSettings.of(models=(ModelChoice(NAME, "tiny", (ALIAS,)),), api_key_file=str(keys))
    for learn, is_faster in (("key", False), ("server", True)):
        with running_server(learning(learn), settings_given=given) as server:
            (text, first), (same, again) = written(server, ALICE), written(server, ALICE)
            other, bobs = written(server, BOB)
            assert text == same == other
            assert again < first / 2
            assert (bobs < first / 2) == is_faster
            assert metrics(server, ALICE)["draftree_learned_owners"] == (1 if is_faster else 2)


def test_learning_is_counted() -> None:
    with running_server(learning("server")) as server:
        asyncio.run(warm_up(tuple(server.pool)))
        written(server)
        found = metrics(server)
        assert found["draftree_learned_texts_total"] == 1, "the warm-up is not learned"
        assert found["draftree_learned_tokens_total"] == 60
        assert found["draftree_learned_size"] >= 60
        assert found["draftree_learned_bytes"] > 0
        (stats,) = status(server)
        assert (stats["name"], stats["texts"], stats["tokens"]) == ("suffix", 1, 60)


def test_without_learning_there_are_no_metrics_of_it() -> None:
    with running_server(learning(None)) as server:
        written(server)
        assert not metrics(server)
        assert status(server) == []


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="learn is 'all'"):
        settings(learn="all")
    plain = ServerSettings.of(models=choose_models(["stories15m"], ["ngram"]), learn="server")
    with pytest.raises(ConfigurationError, match="no model has a drafter that learns"):
        plain.require_methods()
    both = ServerSettings.of(models=choose_models(["a=stories15m", "b=stories15m"], ["a=ngram"]), learn="server")
    both.require_methods()
    assert [both.options_of(choice).learn for choice in both.models] == [None, "server"]


def test_replicas_share_no_folder() -> None:
    with pytest.raises(ConfigurationError, match="cannot share a folder"):
        ReplicaOptions().require_fit(settings(learn="server,folder=learned"))
    ReplicaOptions().require_fit(settings(learn="server"))
