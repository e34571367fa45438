"""Passes in C give what transformers gives, and bit for bit the same however a token is scored."""

from __future__ import annotations

import functools
import os
import platform
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.models.base import Extend, LanguageModel, Slot
from draftree.models.hf import HFModel
from draftree.models.loading import load_model, lower_model
from draftree.models.native import decoder
from draftree.models.native.build import NativeUnavailableError, built_library
from draftree.models.native.library import Library
from draftree.models.native.lowering import lower
from draftree.models.native.model import NativeModel
from families import VOCAB_SIZE, drafter_folder, fresh

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 400}
WINDOW: dict[str, Any] = {"sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True},
    "mistral": {"sliding_window": 37},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "smollm3": {"no_rope_layers": [0, 1]},
}
OTHERS = {
    "gemma2": "capped",
    "gpt2": "has no",
    "olmo2": "has no",
    "cohere": "has no|root-mean-square",
    "mixtral": "has no",
    "gpt_oss": "sinks",
    "qwen3_moe": "has no",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
BUILDS: dict[str, list[str]] = {"this processor": []}
if platform.machine() == "x86_64":
    BUILDS |= {
        "no tiles": ["-mno-amx-tile"],
        "AVX-512": ["-mno-amx-tile", "-mno-avx512bf16", "-mno-avx512vnni"],
        "AVX2": ["-march=haswell"],
        "SSE": ["-march=x86-64"],
    }


def lowered(family: str, kind: str = "float32") -> NativeModel:
    model = HFModel(fresh(family, dtype=DTYPES[kind], **(SIZES | FAMILIES[family])))
    return lower(model, quantization="int8" if kind == "int8" else None)


@functools.cache
def native(family: str, kind: str = "float32") -> NativeModel:
    return lowered(family, kind)


def text(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens


def filled(lm: LanguageModel, tokens: Sequence[int]) -> Slot:
    slot = lm.open()
    if tokens:
        lm.extend([Extend(slot, tokens, range(-1, len(tokens) - 1), logits_at=())])
        lm.commit(slot, range(len(tokens)))
    return slot


def alone(lm: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Logits behind every token, each scored in a pass of its own."""
    slot, rows = lm.open(), []
    for token in tokens:
        rows.append(lm.extend([Extend(slot, [token], [-1])]).logits)
        lm.commit(slot, [0])
    lm.close(slot)
    return torch.cat(rows)


def random_tree(nodes: int, seed: int) -> tuple[list[int], list[int]]:
    choose = random.Random(seed)
    parents = [choose.randrange(-1, node) if node else -1 for node in range(nodes)]
    return [choose.randrange(3, VOCAB_SIZE) for _ in range(nodes)], parents


def way(parents: Sequence[int], node: int) -> list[int]:
    found: list[int] = []
    while node != -1:
        found.append(node)
        node = parents[node]
    return found[::-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    tokens = text(150)
    peer = fresh(family, **(SIZES | FAMILIES[family]))
    with torch.inference_mode():
        wanted = peer(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    lm = native(family)
    slot = lm.open()
    found = lm.extend([Extend(slot, tokens, range(-1, 149))]).logits
    lm.close(slot)
    assert (found - wanted).abs().max() < 2e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.02), ("int8", 0.08)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_smaller_formats_stay_near_float32(family: str, kind: str, share: float) -> None:
    tokens = text(40)
    rows = []
    for lm in (native(family), native(family, kind)):
        slot = lm.open()
        rows.append(lm.extend([Extend(slot, tokens, range(-1, 39))]).logits)
        lm.close(slot)
    spread = rows[0].max() - rows[0].min()
    error = (rows[1] - rows[0]).pow(2).mean().sqrt() / spread
    assert 0 < error < share


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_has_the_same_bits_in_every_tree_and_batch(family: str, kind: str) -> None:
    lm = native(family, kind)
    for seed, prefix in enumerate((0, 1, 30, 63, 64, 100)):
        before = text(prefix)
        tokens, parents = random_tree(9 + 7 * seed, seed)
        slots = [filled(lm, before), filled(lm, text(11))]
        other = random_tree(5, seed + 50)
        jobs = [Extend(slots[0], tokens, parents), Extend(slots[1], *other)]
        scores = lm.extend(jobs if seed % 2 else jobs[::-1]).of(0 if seed % 2 else 1)
        for slot in slots:
            lm.close(slot)
        deepest = max(range(len(parents)), key=lambda node: len(way(parents, node)))
        for node in {0, len(parents) - 1, deepest}:
            branch = way(parents, node)
            assert torch.equal(scores[branch], alone(lm, [*before, *(tokens[n] for n in branch)])[prefix:])


@pytest.mark.parametrize("kind", DTYPES)
def test_a_tree_that_grows_pass_by_pass_and_is_pruned_keeps_its_bits(kind: str) -> None:
    lm = native("qwen3", kind)
    before = text(70)
    slot = filled(lm, before)
    lm.extend([Extend(slot, [5, 6], [-1, -1], logits_at=())])
    lm.extend([Extend(slot, [7, 8, 9], [1, 0, 1], logits_at=())])
    lm.prune(slot, [1, 2, 4])
    scores = lm.extend([Extend(slot, [10, 11], [2, 1])]).logits
    assert torch.equal(scores[0], alone(lm, [*before, 6, 9, 10])[-1])
    assert torch.equal(scores[1], alone(lm, [*before, 6, 7, 11])[-1])
    lm.commit(slot, [0, 2])
    lm.truncate(slot, 71)
    again = lm.extend([Extend(slot, [9, 10], [-1, 0])]).logits
    assert torch.equal(again[1], scores[0])
    lm.close(slot)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    lm, before = native("llama", "bfloat16"), torch.get_num_threads()
    wanted = alone(lm, text(20))
    try:
        torch.set_num_threads(threads)
        assert torch.equal(alone(lm, text(20)), wanted)
    finally:
        torch.set_num_threads(before)


def test_passes_of_two_callers_at_once_on_more_threads_than_cores_keep_their_bits() -> None:
    models = [lowered("llama", "bfloat16"), lowered("qwen3", "int8")]
    wanted, before = [alone(lm, text(30)) for lm in models], torch.get_num_threads()
    try:
        torch.set_num_threads(2 * (os.cpu_count() or 1) + 3)
        with ThreadPoolExecutor(2) as callers:
            rounds = [list(callers.map(alone, models, [text(30)] * 2)) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found, known) for each in rounds for found, known in zip(each, wanted, strict=True))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", BUILDS)
def test_every_set_of_instructions_agrees(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(built_library(extra_flags=BUILDS[name]))
    monkeypatch.setattr(decoder, "library", lambda: library)
    lm, tokens = lowered("gemma3_text", kind), text(90)
    rows = alone(lm, tokens)
    slot = lm.open()
    at_once = lm.extend([Extend(slot, tokens, range(-1, 89))]).logits
    assert torch.equal(at_once, rows)
    spread = rows.max() - rows.min()
    assert (rows - alone(native("gemma3_text", kind), tokens)).pow(2).mean().sqrt() < 0.01 * spread


@torch.no_grad()
def with_bytes_for_weights(family: str) -> Any:
    model = fresh(family, **(SIZES | FAMILIES[family]))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / scale).round() * scale)
    return model


@pytest.mark.parametrize("name", BUILDS)
def test_int8_rounds_weights_and_hardly_anything_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(built_library(extra_flags=BUILDS[name]))
    monkeypatch.setattr(decoder, "library", lambda: library)
    rows = []
    for quantization in (None, "int8"):
        lm = lower(HFModel(with_bytes_for_weights("mistral")), quantization=quantization)
        slot = lm.open()
        rows.append(lm.extend([Extend(slot, text(60), range(-1, 59))]).logits)
    spread = rows[0].max() - rows[0].min()
    assert (rows[1] - rows[0]).abs().max() < 3e-4 * spread  # inputs of 8 bits: 3e-2


@pytest.mark.parametrize("family", OTHERS)
def test_other_kinds_are_left_whole(family: str) -> None:
    model = fresh(family)
    lm = HFModel(model)
    before = alone(lm, text(5))
    with pytest.raises(NativeUnavailableError, match=OTHERS[family]):
        lower(lm)
    assert torch.equal(alone(lm, text(5)), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden_size": 40, "head_dim": 16}, "hidden size of 40"), ({"head_dim": 8}, "size of a head of 8")],
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(NativeUnavailableError, match=message):
        lower(HFModel(fresh("llama", **(SIZES | change))))


def test_a_parameter_of_unknown_use_is_refused() -> None:
    model = fresh("llama", **SIZES)
    model.model.layers[1].strange = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(NativeUnavailableError, match="unknown use"):
        lower(HFModel(model))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return drafter_folder("llama", tmp_path, distance=0.0, **SIZES)


def test_a_model_that_is_loaded_runs_in_c_and_says_so(folder: Path) -> None:
    llm = LLM(folder, exact=True)
    assert llm.is_exact
    assert llm.kernels.startswith("native (")
    assert load_model(folder, kernels="torch").kernels == "torch"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["ngram,min=1", "model:{}", "model:{},tree=best-9"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_changes_a_text(folder: Path, tmp_path: Path, dtype: str, draft: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=4)
    prompts = [text(9), text(60), text(3)]
    plain = LLM(folder, dtype=dtype, exact=True).generate(prompts, params)
    drafter = drafter_folder("llama", tmp_path, **SIZES)
    done = LLM(folder, draft.format(drafter), dtype=dtype, exact=True).generate(prompts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted_tokens for one in done) > 0


def test_what_computes_something_else_is_read_again_for_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = load_model(folder, dtype="float32", kernels="torch").model
    monkeypatch.setattr("draftree.models.native.describing._epsilon", lambda norm: 3.0)
    monkeypatch.setattr("draftree.models.native.describing._norm_offset", lambda norm: 0.0)
    loaded = load_model(folder, dtype="float32")
    assert loaded.kernels == "torch"
    assert "differ" in str(loaded.why_torch)
    assert torch.equal(alone(loaded.model, text(6)), alone(wanted, text(6)))
    with pytest.raises(ConfigurationError, match="differ"):
        load_model(folder, dtype="float32", kernels="native")


def test_without_a_compiler_passes_run_through_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(decoder, "library", lambda: Library(built_library()))
    loaded = load_model(folder)
    assert loaded.kernels == "torch"
    assert "no-such-compiler" in str(loaded.why_torch)
    with pytest.raises(ConfigurationError, match=r"exact was asked for.*no-such-compiler"):
        LLM(folder, exact=True)
    with pytest.raises(ConfigurationError, match="no-such-compiler"):
        LLM(folder, kernels="native")
    with pytest.raises(ConfigurationError, match="no-such-compiler"):
        LLM(folder, quantization="int8")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int main( {")
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    with pytest.raises(NativeUnavailableError, match="error"):
        built_library([source])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "cuda"}, "unknown kernels 'cuda'"),
        ({"quantization": "int4"}, "unknown quantization 'int4'"),
        ({"quantization": "int8", "kernels": "torch"}, "needs native kernels"),
        ({"quantization": "int8", "dtype": "float64"}, "float32 and bfloat16"),
    ],
)
def test_what_can_not_be_is_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LLM(folder, **options)  # type: ignore[arg-type]


def test_a_loaded_model_keeps_its_weights() -> None:
    with pytest.raises(ConfigurationError, match="loaded already"):
        LLM(fresh("llama", **SIZES), kernels="native")


def test_int8_is_announced(folder: Path) -> None:
    llm = LLM(folder, quantization="int8", exact=True)
    assert (llm.quantization, llm.is_exact) == ("int8", True)
    assert lower_model(fresh("llama", **SIZES), quantization="int8").quantization == "int8"
