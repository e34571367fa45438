"""Several models under one server: names, aliases, and one budget of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from draftree.core.errors import ConfigurationError
from draftree.serve.pool import ModelPool, ServedModel, load_models
from draftree.serve.settings import ModelChoice, ServerSettings
from serving import ALIAS, NAME, running_server, tiny_async_llm, tiny_model, tiny_tokenizer


def folder(where: Path, seed: int) -> str:
    path = where / f"model-{seed}"
    tiny_model(seed).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def test_models_and_aliases_are_listed(http: httpx.Client) -> None:
    found = http.get("/v1/models").json()
    assert found["object"] == "list"
    assert [row["id"] for row in found["data"]] == [NAME, ALIAS]
    for row in found["data"]:
        assert (row["object"], row["root"], row["max_model_len"]) == ("model", NAME, 512)
        assert row["drafts"] == ["ngram"]
        assert http.get(f"/v1/models/{row['id']}").json() == row
    missing = http.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_two_models_share_one_budget(tmp_path: Path) -> None:
    choices = (
        ModelChoice("one", folder(tmp_path, 1), ("first",), ("ngram", "suffix")),
        ModelChoice("two", folder(tmp_path, 2), (), ()),
    )
    total = 64 * 2**20
    models = load_models(ServerSettings.of(models=choices, memory=total, kernels="torch"))
    budgets = [model.llm.llm.engine._allocator.budget.sequence_bytes for model in models]
    assert sum(budgets) == pytest.approx(total, abs=2)
    assert budgets[0] == budgets[1]
    body: dict[str, Any] = {"prompt": "The quick brown fox", "max_tokens": 16, "seed": 1}
    with running_server(models) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        rows = {row["id"]: row["drafts"] for row in http.get("/v1/models").json()["data"]}
        drafts = ["ngram", "suffix", "prediction"]
        assert rows == {"one": drafts, "first": drafts, "two": []}
        texts = [
            http.post("/v1/completions", json={**body, "model": name}).json()["choices"][0]["text"]
            for name in ("one", "first", "two")
        ]
        assert texts[0] == texts[1] != texts[2]
        refused = http.post("/v1/completions", json={**body, "model": "two", "draft": "ngram"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "draft")


@pytest.mark.parametrize(("drafts", "verify"), [(("auto",), "coupled"), (("ngram",), "coupled"), (("ngram",), "block")])
def test_a_prediction_is_drafted_from_beside_any_drafter(tmp_path: Path, drafts: tuple[str, ...], verify: str) -> None:
    choices = (ModelChoice("one", folder(tmp_path, 1), (), drafts),)
    settings = ServerSettings.of(models=choices, kernels="torch", plan="fixed", verify=verify)
    body: dict[str, Any] = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0}
    with running_server(load_models(settings)) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        (plain,) = http.post("/v1/completions", json={**body, "draft": "none"}).json()["choices"]
        predicted = {"prediction": {"type": "content", "content": plain["text"]}, "draftree": {"rounds": True}}
        answer = http.post("/v1/completions", json={**body, **predicted})
    assert "warning" not in answer.headers
    found = answer.json()
    assert found["choices"][0]["text"] == plain["text"]
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    sources = [source for row in found["draftree"]["rounds"] for node in row["nodes"] for source in node["sources"]]
    assert {source.partition(",")[0] for source in sources} == {"prediction"}


def test_merged_predictions_with_options_are_counted() -> None:
    body: dict[str, Any] = {"prompt": "The quick brown fox", "max_tokens": 24, "seed": 1}
    with (
        running_server(draft="prediction,k=8+ngram", plan="fixed") as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        (plain,) = http.post("/v1/completions", json={**body, "draft": "none"}).json()["choices"]
        predicted = {"prediction": {"type": "content", "content": plain["text"]}}
        usage = http.post("/v1/completions", json={**body, **predicted}).json()["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize(
    ("drafts", "options", "loaded"),
    [
        (("prediction+suffix",), {}, ("prediction+suffix",)),
        (("ngram",), {"verify": "block"}, ("ngram", "prediction,width=1")),
        (("ngram",), {}, ("ngram", "prediction")),
        ((), {}, ()),
    ],
)
def test_the_drafter_of_predictions_is_loaded_where_it_fits(
    tmp_path: Path, drafts: tuple[str, ...], options: dict[str, Any], loaded: tuple[str, ...]
) -> None:
    choice = ModelChoice("one", folder(tmp_path, 1), (), drafts)
    (model,) = load_models(ServerSettings.of(models=(choice,), kernels="torch", **options))
    assert model.drafts == loaded
    model.llm._driver.close()


def test_names_must_differ() -> None:
    llm = tiny_async_llm(None)
    with pytest.raises(ConfigurationError, match="two served models have the name 'a'"):
        ModelPool([ServedModel("a", llm), ServedModel("b", llm, ("a",))])
    with pytest.raises(ConfigurationError, match="at least one model"):
        ModelPool([])
    llm._driver.close()
