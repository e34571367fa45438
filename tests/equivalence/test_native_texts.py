"""Drafts change no text of native kernels, whatever the family, the weights and the keys, in batches and alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
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
