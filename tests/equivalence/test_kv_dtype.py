"""Keys and values of 8 bits: values, memory, texts that no draft and no batch changes, and refusals."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.core.tree import path
from draftree.loading.load import load_model
from draftree.models.base import Extend, Pass
from draftree.models.native import decoder
from draftree.models.native.model import NativeModel
from families import fresh
from native_builds import EACH_BUILD, built
from native_samples import DTYPES, in_c, lowered, text
from native_seq2seq import model_of
from second_starts import SIZES
from slot_samples import alone, at_once, filled

pytestmark = [in_c, pytest.mark.usefixtures("store")]

SHAPES = [(4, 2, 16), (9, 3, 64), (2, 1, 128), (3, 3, 80), (20, 1, 96)]
"""Heads, key heads and their size: keys that are transposed by four dimensions in a lane, others, and both."""


def shape(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def in_codes(family: str, kind: str = "bfloat16", **others: Any) -> NativeModel:
    found = lowered(family, kind, **others)
    found.use_kv_dtype("int8")
    return found


def random_tree(nodes: int, seed: int) -> tuple[list[int], list[int]]:
    choose = random.Random(seed)
    parents = [choose.randrange(-1, node) if node else -1 for node in range(nodes)]
    return text(nodes), parents


@pytest.mark.parametrize("name", EACH_BUILD)
@pytest.mark.parametrize("sizes", SHAPES)
def test_codes_are_numbers_by_the_largest_of_a_head(
    name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = built(name)
    monkeypatch.setattr(decoder, "library", lambda: library)
    tokens, dim = text(70), sizes[2]
    exact, rounded = lowered("mistral", "float32", **shape(*sizes)), in_codes("mistral", "float32", **shape(*sizes))
    for lm in (exact, rounded):
        filled(lm, tokens)
    for store in ("keys", "values"):
        # the inputs of later layers differ
        wanted, rows = (getattr(lm._pool.memory, store)[0][0, :, : len(tokens)] for lm in (exact, rounded))
        codes, scale = rows[..., :dim].float(), rows[..., dim:].contiguous().view(torch.float32)
        assert torch.allclose(scale[..., 0], wanted.abs().amax(-1) / 127, rtol=1e-6)
        assert codes.abs().amax() == 127
        assert ((codes * scale - wanted).abs() <= 0.5001 * scale).all()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2"])
def test_logits_stay_near_those_of_wider_keys(family: str, kind: str) -> None:
    tokens = text(150)
    wanted, found = at_once(lowered(family, kind), tokens), at_once(in_codes(family, kind), tokens)
    error = (found - wanted).pow(2).mean().sqrt() / (wanted.max() - wanted.min())
    assert 0 < error < 0.01


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral", "mixtral"])
@pytest.mark.parametrize("name", EACH_BUILD)
def test_a_node_has_the_same_bits_in_every_tree_and_batch(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = built(name)
    monkeypatch.setattr(decoder, "library", lambda: library)
    lm = in_codes(family)
    for seed, prefix in enumerate((0, 1, 63, 100)):
        before = text(prefix)
        tokens, parents = random_tree(9 + 7 * seed, seed)
        slots = [filled(lm, before), filled(lm, text(11))]
        jobs = [Extend(slots[0], tokens, parents), Extend(slots[1], *random_tree(5, seed + 50))]
        scores = lm.run(Pass(jobs)).of(0).tensor()
        for slot in slots:
            lm.close(slot)
        for node in (0, len(parents) - 1):
            branch = path(parents, node)
            assert torch.equal(scores[branch], alone(lm, [*before, *(tokens[n] for n in branch)])[prefix:])


@pytest.mark.parametrize("sizes", SHAPES)
def test_where_a_prompt_is_cut_changes_no_bit(sizes: tuple[int, int, int]) -> None:
    lm, tokens, choose = in_codes("mistral", **shape(*sizes), sliding_window=150), text(300), random.Random(7)
    wanted = at_once(lm, tokens)
    for pieces in (2, 40):
        slot = lm.open()
        for start, end in itertools.pairwise([0, *sorted(choose.sample(range(1, 300), pieces - 1)), 300]):
            found = lm.run(Pass([Extend(slot, tokens[start:end], range(-1, end - start - 1))])).logits.tensor()
            assert torch.equal(found, wanted[start:end])
            lm.commit(slot, range(end - start))
        lm.close(slot)


def test_a_pruned_tree_and_a_copied_prefix_keep_their_bits() -> None:
    lm, before = in_codes("qwen3"), text(70)
    slot = filled(lm, before)
    lm.run(Pass([Extend(slot, [5, 6, 7, 8, 9], [-1, -1, 1, 0, 1], logits_at=())]))
    lm.commit(slot, [], [1, 2, 4])
    copy = lm.fork(slot, 33)
    scores = lm.run(Pass([Extend(slot, [10, 11], [2, 1]), Extend(copy, [12], [-1])]))
    assert torch.equal(scores.of(0).tensor()[0], alone(lm, [*before, 6, 9, 10])[-1])
    assert torch.equal(scores.of(0).tensor()[1], alone(lm, [*before, 6, 7, 11])[-1])
    assert torch.equal(scores.of(1).tensor()[0], alone(lm, [*before[:33], 12])[-1])


def test_a_token_takes_half_the_memory(folder: Path) -> None:
    wide, narrow = (load_model(folder, dtype="bfloat16", kv_dtype=kind).model for kind in (None, "int8"))
    plan = narrow.blueprint  # type: ignore[attr-defined]
    numbers = 2 * len(plan.layers) * plan.kv_heads
    assert wide.footprint.token == numbers * 2 * plan.head_dim
    assert narrow.footprint.token == numbers * (plan.head_dim + 4)
    assert (wide.footprint.weights, wide.dtype) == (narrow.footprint.weights, narrow.dtype)


def test_weights_that_are_streamed_have_such_keys_too(folder: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0)
    found = [
        LLM(folder, "none", dtype="bfloat16", kv_dtype="int8", offload=offload)
        .generate([text(20)], params)[0]
        .token_ids
        for offload in (None, "1GB")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int4"}, "unknown kv_dtype 'int4'"),
        ({"kv_dtype": "int8", "kernels": "torch"}, "needs native kernels"),
        ({"kv_dtype": "int8", "kernels": "graphs"}, "needs native kernels"),
        ({"kv_dtype": "int8", "dtype": "float64"}, "needs native kernels"),
        ({"kv_dtype": "int8", "tp": 2}, "leave out kv_dtype, or tp and pp"),
    ],
)
def test_refusals(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LLM(folder, **options)


def test_encoder_decoder_and_loaded_models_are_refused(tmp_path: Path, folder: Path) -> None:
    model_of("t5").save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigurationError, match="encoder-decoder model"):
        LLM(tmp_path / "t5", "none", kv_dtype="int8", dtype="float32")
    with pytest.raises(ConfigurationError, match="already loaded"):
        LLM(load_model(folder), "none", kv_dtype="int8")
    with pytest.raises(ConfigurationError, match="already loaded"):
        LLM(fresh("llama", **SIZES), "none", kv_dtype="int8")
