"""Drafts change no text of native kernels, whatever the family, the weights and the keys, in batches and alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.types import Budget, RoundRecord
from draftree.engine import round as rounds
from draftree.engine.sequence import Update
from draftree.loading.load import load_model
from draftree.models.native import library
from draftree.models.native.model import NativeModel
from draftree.planners import PLANNERS
from draftree.planners.base import Planner
from families import drafter_folder
from native_samples import FAMILIES, HYBRIDS, SIZES, in_c, text

pytestmark = [in_c, pytest.mark.usefixtures("store")]

WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "keys in int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
}
PROMPTS = [text(9), text(60), text(3)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Path]:
    """The folder of a family's model, perturbed by a distance."""
    where = tmp_path_factory.mktemp("models")

    def save(family: str, distance: float) -> Path:
        folder = where / f"{family}-{distance}"
        if not folder.exists():
            drafter_folder(family, where, distance=distance, **(SIZES | (FAMILIES | HYBRIDS)[family])).rename(folder)
        return folder

    return save


@pytest.mark.essential
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "family", ["llama", "mixtral", "gpt_oss", "gpt_neox", "gemma2", "cohere2", "olmo3", "lfm2", "qwen3_next", "bamba"]
)
def test_no_draft_changes_a_text(family: str, weights: str, saved: Callable[[str, float], Path]) -> None:
    loaded = load_model(saved(family, 0.0), kernels="native", **WEIGHTS[weights])
    assert loaded.model.is_exact
    draft = f"ngram,min=1+model:{saved(family, 0.06)},tree=2-2"
    plain, fast = LLM(loaded, "none", max_batch_size=1), LLM(loaded, draft, plan="fixed", prefill_chunk_size=7)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=4, ignore_eos=True)
        wanted = [one.token_ids for one in plain.generate(PROMPTS, params)]
        for _ in range(2):  # the second time, prefixes are found in finished slots
            done = fast.generate(PROMPTS, params)
            assert [one.token_ids for one in done] == wanted
            assert sum(one.stats.accepted_tokens for one in done) > 0


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "keys in int8"])
@pytest.mark.parametrize("draft", ["quantized:int8,tree=best-8,k=3", "quantized:int4,k=4", "ngram+quantized:int8"])
def test_a_copy_with_fewer_bits_drafts_for_its_target(
    draft: str, weights: str, saved: Callable[[str, float], Path]
) -> None:
    family = "cohere2" if draft.startswith("ngram") else "llama"
    loaded = load_model(saved(family, 0.0), kernels="native", **WEIGHTS[weights])
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=4, ignore_eos=True)
        plain, done = (LLM(loaded, spec, plan=spec and "fixed").generate(PROMPTS, params) for spec in (None, draft))
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
        assert sum(one.stats.accepted_tokens for one in done) > 40


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of passes of every call that runs several."""
    passes: list[int] = []
    decode = NativeModel.decode

    def counted(self: NativeModel, *args: Any, **options: Any) -> list[list[int]]:
        tokens = decode(self, *args, **options)
        passes.append(len(tokens))
        return tokens

    monkeypatch.setattr(NativeModel, "decode", counted)
    return passes


def one_by_one(monkeypatch: pytest.MonkeyPatch, generate: Callable[[], Sequence[Any]]) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "MAX_PASSES", 1)
        return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in generate()]


PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "stop tokens": {"stop_token_ids": list(range(0, 96, 16))},
    "several": {"n": 3},
    "ends": {"max_tokens": 2},
    "penalties": {"repetition_penalty": 1.3},
    "log-probabilities": {"logprobs": 2},
}


@pytest.mark.essential
@pytest.mark.parametrize("asked", PLAIN)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "gpt2", "lfm2"])
def test_several_passes_in_one_call_write_the_texts_of_single_ones(
    family: str, asked: str, saved: Callable[[str, float], Path], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[RoundRecord] = []
    llm = LLM(load_model(saved(family, 0.0), kernels="native"), "none", on_round=records.append)
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.8, "seed": 4, "ignore_eos": True} | PLAIN[asked])
    wanted = one_by_one(monkeypatch, lambda: llm.generate(PROMPTS, params))
    assert not calls
    records.clear()
    done = llm.generate(PROMPTS, params)
    assert [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in done] == wanted
    needs_single = asked in ("penalties", "log-probabilities", "ends")
    assert bool(sum(calls)) == (family != "lfm2" and not needs_single), "recurrent states move pass by pass"
    assert sum(one.stats.rounds for one in done) == sum(len(one.token_ids) for one in done)
    assert all(row.num_written == 1 for record in records for row in record.sequences)
    llm.engine.check_integrity()


@pytest.mark.parametrize("near", [0.0, 0.3, math.inf])
def test_close_choices_are_made_from_the_logits(
    near: float, saved: Callable[[str, float], Path], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(load_model(saved("llama", 0.0), kernels="native"), "none")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)
    wanted = one_by_one(monkeypatch, lambda: llm.generate(PROMPTS, params))
    monkeypatch.setattr(library, "NEAR", near)
    done = llm.generate(PROMPTS, params)
    assert [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in done] == wanted
    assert any(calls) == (near < math.inf)


def test_tokens_are_shown_one_by_one_to_those_who_wait_for_them(
    saved: Callable[[str, float], Path], calls: list[int]
) -> None:
    llm = LLM(load_model(saved("llama", 0.0), kernels="native"), "none")
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True)
    updates: list[Update] = []
    llm.generate(PROMPTS[0], params, on_update=updates.append)
    assert [len(update.token_ids) for update in updates] == [1] * 12
    assert not calls


def test_an_interrupt_between_two_of_several_tokens_leaves_the_engine_whole(
    saved: Callable[[str, float], Path], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(load_model(saved("llama", 0.0), kernels="native"), "none")
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=4, ignore_eos=True)
    wanted = one_by_one(monkeypatch, lambda: llm.generate(PROMPTS, params))

    records: list[RoundRecord] = []

    def interrupt(record: RoundRecord) -> None:
        records.append(record)
        if len(records) == 5:
            raise KeyboardInterrupt

    remove = llm.engine.on_round(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, params)
    remove()
    llm.engine.check_integrity()
    assert any(calls)
    done = llm.generate(PROMPTS, params)
    assert [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in done] == wanted


@pytest.mark.parametrize("draft", ["ngram,min=1+model:{}", "layer-skip,attention=0,mlp=1", "lookahead"])
def test_drafters_go_on_after_rounds_without_them(
    draft: str, saved: Callable[[str, float], Path], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = PLANNERS.find("fixed")
    planned, num_planned = planner.budgets, 0

    def budgets(self: Planner[Any], states: Sequence[Any]) -> list[Budget]:
        nonlocal num_planned
        num_planned += 1
        return [Budget(0, 0)] * len(states) if num_planned % 6 else planned(self, states)

    loaded = load_model(saved("llama", 0.0), kernels="native")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)
    wanted = [one.token_ids for one in LLM(loaded, "none").generate(PROMPTS, params)]
    calls.clear()
    monkeypatch.setattr(planner, "budgets", budgets)
    monkeypatch.setattr(planner, "idle_rounds", lambda _: 5 - num_planned % 6, raising=False)
    done = LLM(loaded, draft.format(saved("llama", 0.06)), plan="fixed").generate(PROMPTS, params)
    assert [one.token_ids for one in done] == wanted
    assert max(calls) == 5
    assert sum(one.stats.draft_tokens for one in done) > 0
