"""Passes in C that several processes compute: the same bits as in one process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from draftree.loading.load import load_model
from families import fresh
from native_samples import FAMILIES, SIZES
from parallel_jobs import all_texts, digest, run

PROMPTS = [[(7 * place) % 50 + 3 for place in range(70)], [4, 5, 6, 4, 5, 6, 4, 5], [11, 12]]
PARAMS = [{"max_tokens": 12, "temperature": 0.7 * (place % 2), "seed": place} for place in range(len(PROMPTS))]
DRAFTS = [None, "suffix,min=1", "early-exit:1,tree=1-2"]
KINDS = [("llama", "float32", None), ("gemma3_text", "bfloat16", None), ("phi3", "bfloat16", "int8")]
KINDS.append(("qwen3", "bfloat16", "int4"))
"""Tied embeddings with biases; norms after the sublayers; fused projections and an embedding of its own; groups."""


def job(folder: Path, family: str, dtype: str, quantization: str | None, **options: Any) -> dict[str, Any]:
    return {
        "model": str(folder / family),
        "options": options,
        "settings": {"dtype": dtype, "device": "cpu", "kernels": "native", "quantization": quantization},
        "prompts": PROMPTS,
        "params": PARAMS,
        "drafts": DRAFTS,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models")
    for family, _, _ in KINDS:
        sizes = SIZES | FAMILIES[family] | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
        fresh(family, **sizes).save_pretrained(where / family)
    return where


@pytest.mark.parametrize("size", [2, 3])
def test_bits_are_those_of_one_process(folder: Path, tmp_path: Path, size: int) -> None:
    jobs = [job(folder, *kind, tp=size) for kind in KINDS]
    found = run(size, tmp_path, [{**one, "digest": True} for one in jobs])
    for one, other in zip(jobs, found, strict=True):
        loaded = load_model(one["model"], **one["settings"])
        wanted = all_texts(loaded, {**one, "drafts": [None]})
        assert other["texts"] == dict.fromkeys(map(str, DRAFTS), wanted["texts"]["None"])
        assert other["digest"] == digest(loaded.model)
        assert other["exact"] is wanted["exact"] is True
        assert other["fingerprint"] == wanted["fingerprint"]
        assert other["kernels"] == wanted["kernels"]
        heads = [loaded.model.input_embedding(), loaded.model.output_head()]
        assert other["heads"] == [hashlib.sha256(one.float().numpy().tobytes()).hexdigest() for one in heads]


def test_more_processes_than_heads_are_refused(folder: Path) -> None:
    from draftree.core.errors import ConfigurationError
    from draftree.models.native.lowering import plan_lowering
    from draftree.models.native.shares import TeamMemory, divide
    from draftree.models.torch.hf import HFModel

    blueprint = plan_lowering(HFModel(fresh("llama", **(SIZES | FAMILIES["llama"]))))
    memory = TeamMemory.create()
    shares = [divide(blueprint, rank, 2, memory) for rank in range(2)]
    for name in ("hidden", "mlp", "vocab", "kv_heads"):
        parts = [getattr(share, name) for share in shares]
        assert parts[0].start == 0
        assert parts[0].stop == parts[1].start
        assert len(parts[0])
        assert len(parts[1])
    assert shares[1].vocab.stop == blueprint.vocab
    assert shares[1].first_head == 2
    with pytest.raises(ConfigurationError, match="2 key-value heads for 3 processes"):
        divide(blueprint, 0, 3, memory)


def test_memory_of_a_team_grows_and_keeps_its_content() -> None:
    import ctypes

    from draftree.models.native.shares import TeamMemory

    ours = TeamMemory.create()
    theirs = TeamMemory.opened(ours.path)
    first = ours.at_least(100)
    ctypes.memset(first, 7, 100)
    assert ctypes.string_at(theirs.at_least(100), 100) == b"\x07" * 100
    assert ours.at_least(50) == first
    assert ctypes.string_at(ours.at_least(1 << 20), 100) == b"\x07" * 100
    ctypes.memset(theirs.at_least(1 << 20), 9, 4)
    assert ctypes.string_at(ours.at_least(1), 4) == b"\x09" * 4
