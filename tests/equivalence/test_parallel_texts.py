"""Models that several processes compute: texts are those of one process, of native kernels by their bits."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftree.core.errors import ConfigurationError
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.models.native.describe import plan_lowering, plan_model
from draftree.models.native.shares import TeamMemory, divide
from draftree.models.torch.hf import HFModel
from draftree.options import ModelOptions
from families import fresh
from native_samples import FAMILIES, HYBRIDS, SIZES
from parallel_jobs import all_texts, digest, run
from recurrent_samples import RECURRENT

SYSTEM = [(7 * place) % 50 + 3 for place in range(70)]
PROMPTS = [[*SYSTEM, 5, 6, 5, 6], [*SYSTEM, 9, 9, 9], [4, 5, 6, 4, 5, 6, 4, 5], [11, 12]]
PARAMS = [{"max_tokens": 14, "temperature": 0.7 * (place % 2), "seed": place} for place in range(len(PROMPTS))]
NATIVE: dict[str, dict[str, Any]] = {
    "llama": {"dtype": "float32"},
    "gemma3_text": {"dtype": "bfloat16"},
    "phi3": {"dtype": "bfloat16", "quantization": "int8"},
    "qwen3": {"dtype": "bfloat16", "quantization": "int4"},
    "gpt2": {"dtype": "float32"},
    "cohere": {"dtype": "bfloat16", "quantization": "int8"},
    "olmo2": {"dtype": "bfloat16"},
}
"""Tied embeddings with biases; norms after the sublayers; fused projections and an embedding of its own; groups;
transposed weights; pairs that rotate together, in parallel layers; norms over all heads."""

HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"dtype": "bfloat16"},
    "lfm3": {"dtype": "float32"},
    "bamba": {"dtype": "bfloat16", "quantization": "int8"},
    "falcon_h1": {"dtype": "bfloat16", "quantization": "int4"},
    "nemotron_h": {"dtype": "bfloat16"},
}
"""Delta nets and gated attention; short convolutions, gated attention; Mamba2 with a norm of all heads, beside
attention, and in layers without attention and perceptron."""
STATES = ("qwen3_5_text", "olmo_hybrid")
"""Families with recurrent layers that transformers divides into shares of layers and into stages."""
WIDER: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_groups": 1, "mamba_n_heads": 6},
    "nemotron_h": {"mamba_num_heads": 6},
    "granitemoehybrid": {"mamba_n_heads": 6},
}

SPARSE: dict[str, dict[str, Any]] = {
    "qwen3_next": {"dtype": "bfloat16", "quantization": "int4"},
    "granitemoehybrid": {"dtype": "bfloat16", "quantization": "int8"},
    "nemotron_h-experts": {"dtype": "float32"},
    "gpt_oss": {"dtype": "bfloat16"},
}
"""Experts, some with a shared one, beside delta nets and Mamba2; with biases and sinks."""

through_torch = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="transformers needs accelerate to divide a model: the extra parallel"
)


def job(model: Path, *drafts: str, settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "options": options,
        "settings": {"dtype": "float32", "device": "cpu", "kernels": "torch"} | (settings or {}),
        "prompts": PROMPTS,
        "params": PARAMS,
        "drafts": [None, *drafts],
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("divided")
    fresh("llama", num_hidden_layers=5).save_pretrained(where / "llama")
    fresh("qwen3").save_pretrained(where / "qwen3")
    fresh("gemma3_text", tie_word_embeddings=True).save_pretrained(where / "gemma3_text")
    fresh("qwen2", num_attention_heads=6, num_key_value_heads=3, hidden_size=48).save_pretrained(where / "qwen2")
    for family in STATES:
        fresh(family, **RECURRENT[family]).save_pretrained(where / family)
    for family, others in (FAMILIES | HYBRIDS).items():
        if family not in NATIVE | HYBRID | SPARSE:
            continue
        heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
        sizes = SIZES | others | heads | WIDER.get(family, {})
        fresh(family, **sizes).save_pretrained(where / f"native-{family}")
    return where


def in_one_process(one: dict[str, Any]) -> LoadedModel:
    """The model of a job; one that runs through torch has unpacked weights, as shares have."""
    settings = one["settings"]
    if settings["kernels"] != "torch":
        return load_model(one["model"], **settings)
    dtype = getattr(torch, settings["dtype"])
    return load_model(AutoModelForCausalLM.from_pretrained(one["model"], dtype=dtype), kernels="torch")


def require_same(jobs: list[dict[str, Any]], found: list[dict[str, Any]], *facts: str) -> None:
    """Require the texts of one process, and its values of these facts."""
    for one, other in zip(jobs, found, strict=True):
        wanted = all_texts(in_one_process(one), {**one, "drafts": [None]})
        assert other["texts"] == dict.fromkeys(map(str, one["drafts"]), wanted["texts"]["None"])
        for fact in ("fingerprint", "length", *facts):
            assert other[fact] == wanted[fact]
        assert other["open"] == 0
        assert other["messages"] > 30
        options = ModelOptions(one["model"], **one["options"])
        if one["settings"]["kernels"] == "native" or Path(one["model"]).name in STATES:
            continue  # heads and layers with keys are not divided evenly
        assert 0 < other["token_bytes"] * options.tp <= wanted["token_bytes"]
        if options.pp == 1:
            assert other["token_bytes"] * options.tp == wanted["token_bytes"], "keys and values of its own heads only"


@through_torch
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=["layers", "stages"])
def test_two_processes(saved: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    jobs = [
        job(saved / "llama", "suffix,min=1", "ngram,min=1+suffix,min=1", **options),
        job(saved / "qwen3", "suffix,min=1", **options),
        job(saved / "gemma3_text", "early-exit:1,tree=1-2" if "tp" in options else "suffix,min=1", **options),
    ]
    require_same(jobs, run(2, tmp_path, jobs))


@through_torch
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=["layers", "stages"])
def test_states_in_two_processes(saved: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    jobs = [job(saved / family, "suffix,min=1", **options) for family in STATES]
    require_same(jobs, run(2, tmp_path, jobs))


@through_torch
def test_three_processes_with_sums_in_one_order(saved: Path, tmp_path: Path) -> None:
    jobs = [job(saved / "qwen2", "suffix,min=1", settings={"kernels": "graphs"}, tp=3, strict_sums=True)]
    jobs[0]["sums"] = True
    found = run(3, tmp_path, jobs)
    require_same(jobs, found, "exact")
    assert found[0]["sums"] == [True, False], "an all-reduce of three parts depends on the number of rows"


@through_torch
def test_stages_of_tensor_parallel_layers(saved: Path, tmp_path: Path) -> None:
    jobs = [
        job(saved / "llama", "suffix,min=1", tp=2, pp=2),
        job(saved / "gemma3_text", "ngram,min=1", tp=2, pp=2, strict_sums=True),
    ]
    require_same(jobs, run(4, tmp_path, jobs))


@pytest.mark.parametrize("families", [NATIVE, HYBRID, SPARSE], ids=["attention", "states", "experts"])
@pytest.mark.parametrize("size", [2, 3])
def test_bits_of_native_kernels_are_those_of_one_process(
    saved: Path, tmp_path: Path, size: int, families: dict[str, dict[str, Any]]
) -> None:
    jobs = [
        job(saved / f"native-{family}", "suffix,min=1", "early-exit:1,tree=1-2", tp=size, settings=settings)
        for family, settings in families.items()
    ]
    for one in jobs:
        one["settings"]["kernels"], one["digest"] = "native", True
    found = run(size, tmp_path, jobs)
    require_same(jobs, found, "exact", "kernels")
    for one, other in zip(jobs, found, strict=True):
        model: Any = load_model(one["model"], **one["settings"]).model
        assert other["exact"]
        assert other["digest"] == digest(model)
        heads = [model.input_embedding(), model.output_head()]
        assert other["heads"] == [hashlib.sha256(head.float().numpy().tobytes()).hexdigest() for head in heads]


def test_shares_are_disjoint_and_more_processes_than_heads_are_refused() -> None:
    blueprint = plan_lowering(HFModel(fresh("llama", **(SIZES | FAMILIES["llama"]))))
    memory = TeamMemory.create()
    shares = [divide(blueprint, rank, 2, memory) for rank in range(2)]
    for name in ("hidden", "vocab", "kv_heads"):
        parts = [getattr(share, name) for share in shares]
        assert parts[0].start == 0
        assert 0 < parts[0].stop == parts[1].start < parts[1].stop
    assert shares[1].vocab.stop == blueprint.vocab
    assert shares[1].first_head == 2
    with pytest.raises(ConfigurationError, match="2 key-value heads for 3 processes"):
        divide(blueprint, 0, 3, memory)
    states = plan_model(fresh("bamba", **(SIZES | HYBRIDS["bamba"] | {"num_key_value_heads": 4})))
    one_head = replace(states.layers[0].state, heads=1)
    few = replace(states, layers=(replace(states.layers[0], recurrence=one_head), *states.layers[1:]))
    with pytest.raises(
        ConfigurationError, match=r"recurrent layer .* has 1 heads for 2 processes: use tp of at most 1"
    ):
        divide(few, 0, 2, memory)


def test_heads_of_one_group_in_several_shares_have_the_same_keys() -> None:
    memory = TeamMemory.create()
    blueprint = plan_model(fresh("bamba", **(SIZES | HYBRIDS["bamba"] | {"num_key_value_heads": 4})))
    shares = [divide(blueprint, rank, 4, memory) for rank in range(4)]
    whole = blueprint.layers[0].state
    parts = [share.blueprint.layers[0].state for share in shares]
    assert (whole.heads, whole.groups) == (4, 2)
    assert [(part.heads, part.groups, part.place.first) for part in parts] == [(1, 1, 32 * rank) for rank in range(4)]
    assert all(part.has_joint_norm and part.norm == whole.norm for part in parts)
    keys = [share.cuts[share.blueprint.layers[0].qkv[1].weight].rows for share in shares]
    assert keys == [(range(16),), (range(16),), (range(16, 32),), (range(16, 32),)]


def test_memory_of_a_team_grows_and_keeps_its_content() -> None:
    ours = TeamMemory.create()
    theirs = TeamMemory.opened(ours.path)
    first = ours.at_least(100)
    ctypes.memset(first, 7, 100)
    assert ctypes.string_at(theirs.at_least(100), 100) == b"\x07" * 100
    assert ours.at_least(50) == first
    assert ctypes.string_at(ours.at_least(1 << 20), 100) == b"\x07" * 100
    ctypes.memset(theirs.at_least(1 << 20), 9, 4)
    assert ctypes.string_at(ours.at_least(1), 4) == b"\x09" * 4
