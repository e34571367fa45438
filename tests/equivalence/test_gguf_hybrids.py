"""GGUF files of models with recurrent layers write the texts that transformers writes, drafted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
from draftree.models.base import LanguageModel
from draftree.models.native.model import NativeModel
from hybrid_gguf import FULL, hybrid_model, write_hybrid
from native_samples import in_c
from private_cache import private_cache
from slot_samples import at_once

PROMPT, NUM_TOKENS = [5, 6, 7, 8, 9] * 5, 24


@pytest.mark.parametrize("family", ["lfm2", "qwen35", "granitehybrid", "falcon-h1", "nemotron_h_moe"])
def test_a_file_writes_the_texts_of_its_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    model = hybrid_model(family)
    write_hybrid(family, tmp_path / "model.gguf", model=model)
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    loaded = load_model(tmp_path / "model.gguf", dtype="float32")
    for draft in ("none", "ngram"):
        llm = LLM(loaded, draft)
        for _ in range(2):  # the second one may continue a kept prefix
            assert list(llm.generate([PROMPT], params)[0].token_ids) == expected, draft


WIDE = {"hidden_size": 64, "intermediate_size": 64}
MAMBA = {**WIDE, "mamba_n_heads": 8, "mamba_d_state": 16}
DELTA = {**WIDE, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
NATIVE = {
    "qwen35": DELTA,
    "granitehybrid": {**MAMBA, "shared_intermediate_size": 64},
    "falcon-h1": {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "nemotron_h": {**WIDE, "mamba_num_heads": 8, "ssm_state_size": 16, "head_dim": 16},
}


def error_of(loaded: LanguageModel, model: Any) -> float:
    """The largest difference from the logits of the model before rounding, as a share of their range."""
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    return float((at_once(loaded, PROMPT) - expected).abs().max() / (expected.max() - expected.min()))


@in_c
@pytest.mark.parametrize("family", NATIVE)
def test_blocks_of_recurrences_run_natively(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5's value heads stay in the order of the file, in which those of one key head are apart."""
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    model = hybrid_model(family, **NATIVE[family])
    write_hybrid(family, tmp_path / "model.gguf", model=model, kind="Q8_0")
    loaded = load_model(tmp_path / "model.gguf", dtype="float32").model
    assert isinstance(loaded, NativeModel)
    assert loaded.is_exact
    assert error_of(loaded, model) < 0.05


@in_c
@pytest.mark.parametrize("value_heads", [2, 4])
def test_blocks_of_delta_nets_run_in_any_order_of_heads(
    value_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More value heads than key heads are in another order than in transformers."""
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    sizes = {"hidden_size": 128, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
    model = hybrid_model("qwen35", **sizes, linear_num_value_heads=value_heads)
    write_hybrid("qwen35", tmp_path / "model.gguf", model=model, kind="Q8_0")
    loaded = load_model(tmp_path / "model.gguf", dtype="float32")
    assert isinstance(loaded.model, NativeModel)
    assert loaded.model.quantization == "gguf"
    assert error_of(loaded.model, model) < 0.2


@in_c
def test_blocks_of_every_layer_run_natively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only layers of each type are compared when the file is loaded; the others have their own weights as well."""
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    wide = {"hidden_size": 128, "layer_types": ["conv", FULL, "conv", "conv", FULL], "num_hidden_layers": 5}
    model = hybrid_model("lfm2", **wide)
    write_hybrid("lfm2", tmp_path / "model.gguf", model=model, kind="Q8_0")
    loaded = load_model(tmp_path / "model.gguf", dtype="float32").model
    assert isinstance(loaded, NativeModel)
    assert loaded.is_exact
    assert error_of(loaded, model) < 0.05
