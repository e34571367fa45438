"""Encoder-decoder models behind the seam: trees, sources, forks and the bookkeeping of both."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import native_seq2seq
from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError, UnsupportedModelError
from draftree.loading import transformers_model
from draftree.loading.transformers_model import wrap_encoder_decoder
from draftree.models.base import ALL_LAYERS, CheckResult, Extend, Fork, LayerSubset, Pass
from draftree.models.source import FeatureSource, TokenSource
from draftree.models.torch.seq2seq import model as model_module
from draftree.models.torch.seq2seq.model import HFEncoderDecoder
from seq2seq_samples import FAMILIES, SIZES, sample, sources

PREFIX = [5, 9, 11, 7, 30, 21, 8]
TREE = ([8, 17, 23, 41, 12, 33], (-1, 0, 0, -1, 1, 3))
PATHS = ((0, 1, 4), (0, 2), (3, 5))
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")


def wrapped(name: str, **given: Any) -> HFEncoderDecoder:
    return wrap_encoder_decoder(sample(name, **given), name)


def read(model: Any, slot: Any, tokens: list[int]) -> torch.Tensor:
    rows = model.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))])).logits.tensor().clone()
    model.commit(slot, range(len(tokens)))
    return rows


def test_without_positions_by_depth_trees_are_limited_to_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "replace_positions", lambda *_: 64)
    assert wrapped("whisper").supports_trees, "its decoder takes positions as an argument"
    for name in ("t5", "umt5", "bart", "m2m100"):
        with pytest.raises(UnsupportedModelError, match="other logits"):
            wrapped(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_of_sources_equal_the_models_own_forward(name: str) -> None:
    own, model = sample(name), wrapped(name)
    assert model.supports_trees
    if name == "whisper":
        features = np.random.default_rng(0).normal(size=(3, 4, 100)).astype(np.float32)
        given: list[Any] = [FeatureSource(one) for one in features]
    else:
        given = [TokenSource(tuple(ids)) for ids in sources(3)]
    prefixes = [PREFIX[: 2 + place] for place in range(3)]
    slots = [model.open_on(source) for source in given]
    for slot, prefix in zip(slots, prefixes, strict=True):
        read(model, slot, prefix)
    result = model.run(Pass([Extend(slot, TREE[0], TREE[1]) for slot in reversed(slots)]))
    for job, place in enumerate((2, 1, 0)):
        rows = result.of(job).tensor()
        for path in PATHS:
            ids = torch.tensor([[*prefixes[place], *(TREE[0][node] for node in path)]])
            source = given[place]
            encoder = torch.tensor([source.tokens]) if name != "whisper" else torch.from_numpy(source.features)[None]
            with torch.inference_mode():
                wanted = own(**{own.main_input_name: encoder}, decoder_input_ids=ids, use_cache=False).logits[0]
            torch.testing.assert_close(rows[list(path)], wanted[-len(path) :], rtol=1e-4, atol=1e-4)


def test_equal_sources_are_encoded_once_and_dropped_with_their_last_slot() -> None:
    model = wrapped("bart")
    first, second, third = (model.open_on(TokenSource(ids)) for ids in ((5, 6, 7), (5, 6, 7), (5, 6)))
    assert model.num_sources == 2
    twin = model.fork(first, 0)
    model.check_integrity()
    for slot in (first, second):
        model.close(slot)
    assert model.num_sources == 2  # the fork refers to the first source
    model.close(twin)
    assert model.num_sources == 1
    model.close(third)
    assert model.num_sources == 0 == model.num_open
    model.check_integrity()


def test_forks_continue_on_the_same_source() -> None:
    model = wrapped("t5")
    slots = [model.open_on(TokenSource(tuple(ids))) for ids in sources(2)]
    for slot in slots:
        read(model, slot, PREFIX)
    alone = [read(model, model.fork(slot), [8, 17]) for slot in slots]
    assert not torch.allclose(alone[0], alone[1])
    twins = model.apply([Fork(slots[1], 4), Fork(slots[0], 4)])
    both = model.run(Pass([Extend(twin, [*PREFIX[4:], 8, 17], range(-1, 4)) for twin in twins]))
    torch.testing.assert_close(both.of(0).tensor()[-2:], alone[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both.of(1).tensor()[-2:], alone[0], rtol=1e-4, atol=1e-4)
    model.check_integrity()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_kept_nodes_and_committed_paths_equal_rows(name: str) -> None:
    model = wrapped(name)
    source = TokenSource(tuple(sources(3)[2]))
    tree, row = model.open_on(source), model.open_on(source)
    read(model, tree, PREFIX)
    model.run(Pass([Extend(tree, TREE[0], TREE[1])]))
    model.commit(tree, [0], keep=[1, 4])
    more = model.run(Pass([Extend(tree, [19], [1])])).logits.tensor()
    wanted = read(model, row, [*PREFIX, 8, 17, 12, 19])[-1:]
    torch.testing.assert_close(more, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_compiler)])
def test_long_texts_use_biases_of_every_distance(is_native: bool) -> None:
    own = native_seq2seq.model_of("t5") if is_native else sample("t5")
    model = native_seq2seq.lowered("t5") if is_native else wrapped("t5")
    ids = [3 + place * 7 % 50 for place in range(600)]  # the tables grow twice
    source = TokenSource((7, 8, 9))
    with torch.inference_mode():
        wanted = own(input_ids=torch.tensor([source.tokens]), decoder_input_ids=torch.tensor([ids])).logits[0]
    slot = model.open_on(source)
    rows = [read(model, slot, ids[start : start + 60]) for start in range(0, 600, 60)]
    torch.testing.assert_close(torch.cat(rows), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["t5", "marian", "whisper"])
def test_a_wrapped_model_generates_as_before_outside_of_passes(name: str) -> None:
    own, shared = sample(name), sample(name)
    wrap_encoder_decoder(shared, name)
    given = torch.tensor([sources(2)[1]]) if name != "whisper" else torch.randn(1, 4, 100)
    inputs = {own.main_input_name: given, "decoder_input_ids": torch.tensor([PREFIX])}
    with torch.inference_mode():
        torch.testing.assert_close(shared(**inputs).logits, own(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_families_that_cannot_be_scored_are_refused_with_the_reason() -> None:
    sizes = {**SIZES, "num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    refused = {
        "experts": transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**sizes)),
        "attention be chosen": transformers.MvpForConditionalGeneration(transformers.MvpConfig(**SIZES)),
        "other logits": transformers.PegasusXForConditionalGeneration(
            transformers.PegasusXConfig(**SIZES, block_size=4, num_global_tokens=2)
        ),
    }
    for message, model in refused.items():
        before = model.config._attn_implementation
        with pytest.raises(UnsupportedModelError, match=message):
            wrap_encoder_decoder(model.eval(), "refused")
        assert model.config._attn_implementation == before


def test_inexact_trees_limit_a_model_to_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    inexact = CheckResult(chain_error=0.0, tree_error=1.0, tolerance=1e-4)
    monkeypatch.setattr(transformers_model, "check", lambda *_: inexact)
    assert not wrapped("bart").supports_trees
    plain = LLM(sample("bart"), "none").generate([5, 6, 7], SamplingParams(temperature=0))
    chain = LLM(sample("bart"), draft="ngram,min=1").generate([5, 6, 7], SamplingParams(temperature=0))
    assert chain[0].token_ids == plain[0].token_ids
    with pytest.raises(ConfigurationError, match="chains only"):
        LLM(sample("bart"), draft="suffix")


def test_sources_count_for_the_memory_of_sequences() -> None:
    llm = LLM(sample("t5"), "none", sequence_memory=400_000)
    params = SamplingParams(max_tokens=4)
    llm.generate([[5] * 40], params)
    with pytest.raises(InvalidRequestError, match="shorten the prompt"):
        llm.generate([[5] * 2000], params)


def test_what_is_not_a_source_is_refused() -> None:
    model, whisper = wrapped("t5"), wrapped("whisper")
    with pytest.raises(UnsupportedModelError, match="open_on"):
        model.open()
    with pytest.raises(InvalidRequestError, match="reads token ids"):
        model.open_on(FeatureSource(np.zeros((4, 12), np.float32)))
    with pytest.raises(InvalidRequestError, match="at least one token"):
        model.open_on(TokenSource(()))
    with pytest.raises(InvalidRequestError, match=r"features of shape \(4, 100\)"):
        whisper.open_on(FeatureSource(np.zeros((4, 99), np.float32)))
    with pytest.raises(InvalidRequestError, match="features of shape"):
        whisper.open_on(TokenSource((1,)))
    assert model.num_open == whisper.num_open == 0


def test_no_part_of_the_decoder_runs_alone() -> None:
    model = wrapped("bart")
    with pytest.raises(UnsupportedModelError, match="no part runs alone"):
        model.require_part(LayerSubset(end=1))
    with pytest.raises(UnsupportedModelError, match="no part runs alone"):
        model.run(Pass([Extend(model.open_probe(), [5], [-1])], ALL_LAYERS, capture=(1,)))


def test_features_are_values() -> None:
    values = np.arange(48, dtype=np.float32).reshape(4, 12)
    assert FeatureSource(values) == FeatureSource(values.copy())
    assert hash(FeatureSource(values)) == hash(FeatureSource(values.copy()))
    assert FeatureSource(values) != FeatureSource(values.reshape(12, 4))
