"""API keys of a running server: public paths, models of a key, rounds of other models."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from draftree.serve.pool import ServedModel
from draftree.serve.served import ModelChoice
from draftree.serve.settings import ServerSettings
from operated import code_of, post
from serving import ALIAS, NAME, Running, running_server, tiny_async_llm

ALICE, BOB = {"Authorization": "Bearer sk-alice-1234"}, {"Authorization": "Bearer sk-bob-12345"}
OTHER = "other"


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
