"""A second start from the record of the first one gives the same model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.loading.load import LoadedModel, load_model
from families import drafter_folder, fresh
from second_starts import OPTIONS, SIZES, logits

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler"),
    pytest.mark.usefixtures("store"),
]

WINDOW: dict[str, Any] = {
    "sliding_window": 37,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "eos_token_id": [5, 7]},
    "qwen3": {},
    "phi3": {},
    "gemma3_text": WINDOW,
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "smollm3": {"no_rope_layers": [0, 1, 1, 0]},
}


def facts(loaded: LoadedModel) -> list[Any]:
    model = loaded.model
    about = [model.vocab_size, model.max_length, model.fingerprint, model.num_layers, model.footprint, model.is_exact]
    about += [model.dtype, model.self_check, model.supports_trees, str(model.device)]
    return [*about, loaded.folder, loaded.eos_ids, loaded.name, loaded.kernels, loaded.quantization]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_start_computes_the_very_same(tmp_path: Path, family: str, kind: str, reads: list[Path]) -> None:
    changes = SIZES | FAMILIES[family]
    fresh(family, **changes).save_pretrained(tmp_path / family)
    first = load_model(tmp_path / family, **OPTIONS[kind])
    assert first.kernels.startswith("native")
    second = load_model(tmp_path / family, **OPTIONS[kind])
    assert len(reads) == 1
    assert torch.equal(logits(first), logits(second))
    assert facts(first) == facts(second)
    assert second.eos_ids == ((5, 7) if family == "llama" else second.eos_ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_another_dtype(tmp_path: Path, dtype: torch.dtype, reads: list[Path]) -> None:
    fresh("llama", dtype=dtype, **SIZES).save_pretrained(tmp_path / "half")
    for options in OPTIONS.values():
        reads.clear()
        assert torch.equal(*(logits(load_model(tmp_path / "half", **options)) for _ in range(2)))
        assert len(reads) == 1


def test_weights_in_several_files(tmp_path: Path, reads: list[Path]) -> None:
    fresh("qwen3", **SIZES).save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(*(logits(load_model(tmp_path / "many", dtype="float32")) for _ in range(2)))
    assert len(reads) == 1


def test_weights_that_are_renamed_while_they_are_read_are_read_so_every_time(
    tmp_path: Path, store: Path, reads: list[Path]
) -> None:
    model = fresh("llama", **SIZES | {"tie_word_embeddings": True})
    model.model.save_pretrained(tmp_path / "inner")  # without the prefix of the whole model
    assert torch.equal(*(logits(load_model(tmp_path / "inner", dtype="float32")) for _ in range(2)))
    assert len(reads) == 2
    assert not store.exists()


@pytest.mark.parametrize("draft", ["ngram,min=1", "suffix", "early-exit:2", "layer-skip,attention=1", "model:{}"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_the_same_with_every_kind_of_drafter(
    folder: Path, tmp_path: Path, draft: str, temperature: float, reads: list[Path]
) -> None:
    named = draft.format(drafter_folder("llama", tmp_path, **SIZES))
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    prompts = [[5, 6, 7, 5, 6, 7, 5], [40, 2, 9]]
    texts = [[one.token_ids for one in LLM(folder, named).generate(prompts, params)] for _ in range(2)]
    plain = [one.token_ids for one in LLM(folder).generate(prompts, params)]
    assert texts == [plain, plain]
    assert len(reads) == len(set(reads))


def test_digests_do_not_depend_on_threads(folder: Path, reads: list[Path]) -> None:
    load_model(folder)
    torch.set_num_threads(3)
    load_model(folder)
    assert len(reads) == 1


def test_a_second_start_imports_nothing_of_transformers(folder: Path) -> None:
    lines = (
        "import sys; from draftree import LLM, SamplingParams",
        f"done = LLM({str(folder)!r}, 'ngram').generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0))",
        "print(done[0].token_ids, [name for name in sys.modules if name.startswith('transformers')])",
    )
    (first,) = LLM(folder, "ngram").generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0))
    program = [sys.executable, "-W", "ignore", "-c", "\n".join(lines)]
    second = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert second == f"{first.token_ids} []\n"
