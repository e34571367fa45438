"""A model that drafts with a part of its own layers writes the same text as alone, and reports the saved layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import draftree
from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, ModelError
from draftree.loading.layer_sets import LayerSet, place_of, store, stored_set
from draftree.loading.load import load_model
from draftree.models.base import ALL_LAYERS, LayerSubset, Pass
from draftree.models.kv.slotted import SlottedModel
from families import drafter_folder, fresh, prompts, target
from native_samples import in_c
from paced import steady
from private_cache import private_cache

RAGGED = prompts(3, 17, 9)
LONG = prompts(70)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 4}
SELF_DRAFTING = ["early-exit:3", "early-exit:2,tree=best-9", "layer-skip,attention=1-3", "layer-skip,mlp=2,tree=1-2-2"]
SKIPPING = "layer-skip,attention=1"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    return tmp_path


def params(temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "temperature": temperature, "seed": 11} | more))


def ids(llm: LLM, temperature: float) -> list[tuple[int, ...]]:
    return [done.token_ids for done in llm.generate(RAGGED, params(temperature))]


@in_c
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", [*SELF_DRAFTING, "early-exit:1+layer-skip,mlp=1+ngram,min=1"])
def test_passes_in_c_write_the_same_text_by_their_bits(llama: Path, draft: str, dtype: str) -> None:
    plain, fast = (LLM(llama, spec, dtype=dtype, exact=True, plan=steady(spec)) for spec in (None, draft))
    for temperature in (0.0, 1.0):
        done = fast.generate(RAGGED, params(temperature))
        assert [one.token_ids for one in done] == ids(plain, temperature)
        assert sum(one.stats.accepted_tokens for one in done) > 0
        assert [fast.generate(prompt, params(temperature))[0].token_ids for prompt in RAGGED] == ids(plain, temperature)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=in_c)])
def test_layers_run_once_for_drafted_tokens(llama: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text with and without taking over; the difference is all that partial passes computed."""
    runs, texts = [], []
    for takes_over in (True, False):
        loaded = load_model(llama, dtype="float32", kernels=kernels)
        assert isinstance(loaded.model, SlottedModel)
        loaded.model.require_part(LayerSubset(end=3))  # checked once, and not to be counted
        before = loaded.model.num_sublayer_runs
        if not takes_over:
            monkeypatch.setattr(loaded.model, "_take_partials", lambda jobs, capture: {})
        rows = count_partial_rows(loaded.model, monkeypatch)
        done = LLM(loaded, "early-exit:3,k=4", plan="fixed").generate(RAGGED, params(0.0))
        texts.append([one.token_ids for one in done])
        runs.append(loaded.model.num_sublayer_runs - before)
    assert texts[0] == texts[1]
    assert rows[0] > 3 * 24
    assert runs[1] - runs[0] == 2 * 3 * rows[0]


def count_partial_rows(model: SlottedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    run, rows = model.run, [0]

    def counting(pass_: Pass) -> Any:
        if pass_.layers != ALL_LAYERS:
            rows[0] += sum(len(job.tokens) for job in pass_.jobs)
        return run(pass_)

    monkeypatch.setattr(model, "run", counting)
    return rows


def test_a_long_prompt_is_not_read_twice() -> None:
    model = target("llama")
    assert isinstance(model, SlottedModel)
    llm = LLM(model, SKIPPING, plan="fixed")  # which may check the model
    before = model.num_sublayer_runs
    llm.generate(LONG, params(0.0, max_tokens=1))
    assert model.num_sublayer_runs - before == 2 * model.num_layers * len(LONG[0])
    done = LLM(model, SKIPPING, plan="fixed").generate(LONG, params(0.0))
    assert done[0].stats.draft_tokens > 0


def test_a_model_that_is_borrowed_drafts_for_itself() -> None:
    model = fresh("llama")
    given = torch.tensor([RAGGED[1]])
    plain = model.generate(given, max_new_tokens=12, do_sample=False)
    for draft in ("early-exit:1", SKIPPING):
        drafted = model.generate(
            given, max_new_tokens=12, do_sample=False, custom_generate=draftree.generate, draft=draft
        )
        assert torch.equal(drafted, plain)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        ("early-exit:9", ModelError, "2 layers, numbered from 0: layer 9"),
        ("layer-skip,mlp=2", ModelError, "2 layers, numbered from 0: layer 2"),
        ("early-exit:0", ConfigurationError, "at least one layer"),
        ("early-exit", ConfigurationError, "needs layers"),
        ("layer-skip,attention=3+5", ConfigurationError, "attention=3-5-8"),
        ("layer-skip,mlp=x", ConfigurationError, "mlp=3-5-8"),
        ("early-exit:1,tree=9x", ConfigurationError, "tree shape"),
    ],
)
def test_impossible_requests_are_refused(draft: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(target("llama"), draft)


def test_families_without_parts_are_named() -> None:
    with pytest.raises(ModelError, match="cannot run a part of its layers"):
        LLM(target("bloom"), "early-exit:1")


def found(fingerprint: str, **changes: Any) -> LayerSet:
    facts: dict[str, Any] = {"attention": (1,), "mlp": (0,), "num_layers": 2, "num_trials": 3, "computed_with": "x"}
    seconds = ("seconds_per_token", "plain_seconds_per_token", "unseen_seconds_per_token")
    facts |= dict.fromkeys((*seconds, "unseen_plain_seconds_per_token"), 0.5)
    return LayerSet(fingerprint, **(facts | changes))


def test_a_tuned_set_is_used(cache: Path) -> None:
    model = target("llama")
    with pytest.raises(ConfigurationError, match="draftree tune layers MODEL --prompts FILE"):
        LLM(model, "layer-skip")
    place = store(found(model.fingerprint))
    assert place.is_relative_to(cache)
    assert stored_set(model.fingerprint) == found(model.fingerprint)
    llm = LLM(model, "layer-skip", plan="fixed")
    assert llm.draft_note == "of 2 layers 1 attentions (1) and 1 perceptrons (0) are left out"
    by_hand = LLM(model, found("").spec, plan="fixed")
    for one, other in zip(*(each.generate(RAGGED, params(0.0)) for each in (llm, by_hand)), strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.draft_tokens == other.stats.draft_tokens > 0
        assert one.stats.accepted_tokens == other.stats.accepted_tokens


@pytest.mark.parametrize("content", ["{", "{}", json.dumps({"attention": [], "mlp": []})])
def test_a_stored_set_that_cannot_be_read_is_named(cache: Path, content: str) -> None:
    place = place_of(target("llama").fingerprint)
    place.parent.mkdir()
    place.write_text(content)
    with pytest.raises(ConfigurationError, match=place.name):
        LLM(target("llama"), "layer-skip")


def test_a_model_has_one_fingerprint_however_it_is_loaded(llama: Path, tmp_path: Path) -> None:
    prints = {
        load_model(llama, dtype=dtype, kernels=kernels).model.fingerprint
        for dtype in ("float32", "bfloat16")
        for kernels in ("auto", "torch")
    }
    assert len(prints) == 1
    other = drafter_folder("llama", tmp_path, distance=0.01, **SIZES)
    assert load_model(other).model.fingerprint not in prints
