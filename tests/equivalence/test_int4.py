"""Weights of 4 bits that are quantized at load: memory, second start, texts, drafts of a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.loading import load as loading
from draftree.loading.load import load_model
from draftree.models.native.groups import HEAD_KIND, LAYER_KIND
from draftree.models.native.library import library
from families import drafter_folder, fresh
from native_samples import text
from second_starts import SIZES, logits

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler"),
    pytest.mark.usefixtures("store"),
]


def test_memory_is_that_of_the_bits(folder: Path) -> None:
    loaded = load_model(folder, quantization="int4", dtype="bfloat16")
    plan, groups = loaded.model.blueprint, library().groups  # type: ignore[attr-defined]
    wanted = sum(
        -(-linear.outputs // 16) * groups.block_bytes(linear.inputs, LAYER_KIND)
        for layer in plan.layers
        for linear in layer.linears
    )
    heads = 1 if plan.is_tied else 2
    wanted += heads * -(-plan.vocab // 16) * groups.block_bytes(plan.hidden, HEAD_KIND)
    assert wanted <= loaded.model.footprint.weights < wanted + (32 << 10)
    assert groups.block_bytes(4096, LAYER_KIND) == 16 * 4096 * 4.625 / 8


def test_a_second_start_quantizes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]) -> None:
    first = load_model(folder, quantization="int4")
    monkeypatch.setattr(loading, "lower_model", lambda *_, **__: pytest.fail("the packed weights are saved"))
    second = load_model(folder, quantization="int4")
    assert len(reads) == 1
    assert torch.equal(logits(first), logits(second))
    assert first.model.footprint == second.model.footprint
    assert not second.model.streams_weights


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["ngram,min=1", "model:{},tree=best-9"])
def test_no_draft_changes_a_text(folder: Path, tmp_path: Path, draft: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=4)
    prompts = [text(9), text(60), text(3)]
    plain = LLM(folder, quantization="int4", exact=True).generate(prompts, params)
    draft = draft.format(drafter_folder("llama", tmp_path, **SIZES))
    done = LLM(folder, draft, quantization="int4", exact=True, plan="fixed").generate(prompts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted_tokens for one in done) > 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_of_four_bits_drafts_for_its_target(tmp_path: Path, tied: bool) -> None:
    fresh("llama", **(SIZES | {"tie_word_embeddings": tied})).save_pretrained(tmp_path / "llama")
    params = SamplingParams(max_tokens=60, temperature=0.0)
    prompts = [text(9), text(30)]
    plain = LLM(tmp_path / "llama", dtype="bfloat16").generate(prompts, params)
    done = LLM(tmp_path / "llama", "quantized:int4,k=4", dtype="bfloat16", plan="fixed").generate(prompts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted_tokens for one in done) > 20
