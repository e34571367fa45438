"""Captured hidden states: equal to those of transformers, and the same in any batch, tree, chunk or partial pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.core.tree import path
from draftree.models.base import Commit, Extend, LanguageModel, LayerSubset, Pass
from draftree.models.kv.slotted import SlottedModel
from draftree.models.table import TableLM, hashed
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel
from draftree.models.torch.inspection import prompt_inputs
from draftree.models.torch.static import Shapes
from families import SLOTTED, VOCAB_SIZE, fresh, peer, target
from model_subjects import DEEP, LAYERS, PARENTS, PREFIX, TREE, both_kernels, through_c, through_torch
from native_samples import DTYPES, in_c, lower
from native_samples import FAMILIES as NATIVE_FAMILIES
from native_samples import SIZES as NATIVE_SIZES
from slot_samples import filled

ALL = tuple(range(LAYERS + 1))
UNCAPTURED = frozenset({"gemma3n_text"})
"""Families whose residual stream has several parts."""


@torch.inference_mode()
def expected(model: Any, tokens: Sequence[int]) -> Tensor:
    """What enters each layer and leaves the last one, by transformers, shape (tokens, layers + 1, hidden)."""
    ends: list[Tensor] = []
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    hook = layers[-1].register_forward_hook(
        lambda module, args, output: ends.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        output = model(**prompt_inputs(model, torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True))
    finally:
        hook.remove()
    # the last entry of transformers lies after the final norm
    return torch.stack([*output.hidden_states[: len(layers)], ends[0]], dim=2)[0].float()


def expected_in_tree(model: Any) -> Tensor:
    rows = [expected(model, [*PREFIX, *(TREE[node] for node in path(PARENTS, leaf))])[-1] for leaf in range(len(TREE))]
    return torch.stack(rows)


def captured(model: SlottedModel, jobs: Sequence[Extend], capture: tuple[int, ...] = ALL) -> Tensor:
    found = model.run(Pass(jobs, capture=capture)).hidden
    assert found is not None
    return found


def chunk(slot: Any, tokens: Sequence[int], start: int = 0) -> Extend:
    return Extend(slot, tokens, range(start - 1, start - 1 + len(tokens)), logits_at=())


def slotted(model: LanguageModel) -> SlottedModel:
    assert isinstance(model, SlottedModel)
    return model


@pytest.mark.parametrize("family", sorted(set(SLOTTED) - UNCAPTURED))
def test_chunks_and_trees_through_torch_equal_transformers(family: str) -> None:
    model, other = slotted(target(family)), peer(family)
    layers = tuple(range(model.num_layers + 1))
    model.require_capture(layers)
    slot = model.open()
    rows = [captured(model, [chunk(slot, PREFIX[:4])], layers)]
    model.commit(slot, range(4))
    rows.append(captured(model, [chunk(slot, PREFIX[4:])], layers))
    model.commit(slot, range(len(PREFIX) - 4))
    tree = captured(model, [Extend(slot, TREE, PARENTS, logits_at=[0])], layers)
    model.close(slot)
    assert tree.dtype == torch.float32
    assert torch.allclose(torch.cat(rows), expected(other, PREFIX), atol=2e-4)
    assert torch.allclose(tree, expected_in_tree(other), atol=2e-4)


@in_c
@pytest.mark.parametrize("family", sorted(NATIVE_FAMILIES))
def test_chunks_and_trees_in_c_equal_transformers(family: str) -> None:
    changes = NATIVE_SIZES | NATIVE_FAMILIES[family]
    model, other = lower(HFModel(fresh(family, **changes))), fresh(family, **changes)
    layers = tuple(range(model.num_layers + 1))
    slot = model.open()
    prefix = captured(model, [chunk(slot, PREFIX)], layers)
    model.commit(slot, range(len(PREFIX)))
    tree = captured(model, [Extend(slot, TREE, PARENTS)], layers)
    for found, wanted in ((prefix, expected(other, PREFIX)), (tree, expected_in_tree(other))):
        size = float(wanted.abs().max())  # hundreds where activations are squared
        assert torch.allclose(found, wanted, rtol=1e-5, atol=max(2e-4, 1e-5 * size))


@in_c
@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 0.03), ("int8", 0.06)])
def test_half_precision_and_int8_in_c_are_near_transformers(kind: str, error: float) -> None:
    model, other = through_c(kind), fresh("qwen3", dtype=torch.bfloat16, **DEEP)
    slot = model.open()
    found, wanted = captured(model, [chunk(slot, PREFIX)]), expected(other, PREFIX)
    model.close(slot)
    assert found.dtype == torch.float32
    assert torch.equal(found[:, 0], wanted[:, 0]), "embeddings are exact"
    assert float((found - wanted).norm()) <= error * float(wanted.norm())


@in_c
@pytest.mark.parametrize("kind", sorted(DTYPES))
def test_captured_rows_in_c_are_bit_identical_in_every_pass(kind: str) -> None:
    model = through_c(kind)
    slots = [filled(model, PREFIX) for _ in range(3)]
    alone = captured(model, [Extend(slots[0], TREE, PARENTS)])
    logits = model.run(Pass([Extend(slots[1], TREE, PARENTS)])).logits.tensor()
    model.apply([Commit(slot, ()) for slot in slots])
    outcome = model.run(Pass([chunk(slots[2], PREFIX), Extend(slots[0], TREE, PARENTS)], capture=(3, 0)))
    assert outcome.hidden is not None
    assert torch.equal(outcome.hidden[len(PREFIX) :], alone[:, [3, 0]])
    parts = [captured(model, [chunk(slots[1], TREE[:1])]), captured(model, [Extend(slots[1], [TREE[1]], [0])])]
    assert torch.equal(torch.cat(parts), alone[:2])
    model.apply([Commit(slot, ()) for slot in slots])
    captured(model, [Extend(slots[0], TREE, PARENTS)])
    model.commit(slots[0], ())
    assert torch.equal(model.run(Pass([Extend(slots[0], TREE, PARENTS)])).logits.tensor(), logits), (
        "a capture changes nothing"
    )
    for slot in slots:
        model.close(slot)


@both_kernels
def test_rows_of_a_batch_stand_in_the_order_of_the_jobs(build: Any) -> None:
    model = build()
    slots = [filled(model, PREFIX[:length]) for length in (4, 11, 2)]
    jobs = [Extend(slot, TREE[: 2 + i], PARENTS[: 2 + i]) for i, slot in enumerate(slots)]
    wanted = [captured(model, [job]) for job in jobs]
    model.apply([Commit(slot, ()) for slot in slots])
    found = captured(model, [jobs[2], jobs[0], jobs[1]])
    assert torch.allclose(found, torch.cat([wanted[2], wanted[0], wanted[1]]), atol=2e-4)
    for slot in slots:
        model.close(slot)


@both_kernels
def test_partial_passes_capture_the_layers_that_they_run(build: Any) -> None:
    model = build()
    slot = filled(model, PREFIX)
    whole = captured(model, [Extend(slot, TREE, PARENTS)])
    model.commit(slot, ())
    part = model.run(Pass([Extend(slot, TREE[:3], PARENTS[:3])], LayerSubset(end=2), (0, 2, 1)))
    assert torch.allclose(part.hidden, whole[:3, [0, 2, 1]], atol=2e-4)
    before = model.num_sublayer_runs
    resumed = captured(model, [Extend(slot, TREE, PARENTS)], (2, 3, 4))
    known = 4  # nodes 0 to 2, and node 3, which has the token and the parent of node 0
    assert model.num_sublayer_runs - before == 2 * LAYERS * len(TREE) - 2 * 2 * known
    assert torch.allclose(resumed, whole[:, 2:], atol=2e-4)
    model.commit(slot, ())
    model.run(Pass([Extend(slot, TREE[:3], PARENTS[:3])], LayerSubset(end=2)))
    assert torch.allclose(captured(model, [Extend(slot, TREE, PARENTS)], (1, 4)), whole[:, [1, 4]], atol=2e-4)
    model.close(slot)


@both_kernels
def test_a_layer_without_sublayers_passes_on_what_enters_it(build: Any) -> None:
    model = build()
    slot = filled(model, PREFIX)
    part = LayerSubset(attention=frozenset({1, 3}), mlp=frozenset({1, 2, 3}))
    found = model.run(Pass([Extend(slot, TREE, PARENTS)], part, ALL)).hidden
    model.close(slot)
    assert torch.equal(found[:, 1], found[:, 2])
    assert torch.equal(found[:, 3], found[:, 4])
    for before, after in ((0, 1), (2, 3)):
        assert not torch.allclose(found[:, before], found[:, after], atol=1e-2)


def test_fixed_shapes_capture_through_dynamic_passes() -> None:
    model = HFModel(fresh("llama"), shapes=Shapes())
    slot = filled(model, PREFIX)
    tree = captured(model, [Extend(slot, TREE, PARENTS)], (0, 1, 2))
    assert torch.allclose(tree, expected_in_tree(peer("llama")), atol=2e-4)
    model.close(slot)


@pytest.mark.parametrize("family", ["bloom", "falcon", "gpt_neo", "mpt", "qwen2_moe"])
def test_chains_of_models_with_a_cache_of_their_own_equal_transformers(family: str) -> None:
    model, other = target(family), peer(family)
    assert isinstance(model, CachedModel)
    model.require_capture((0, 2))
    slots = [model.open(), model.open()]
    first = model.run(Pass([chunk(slots[0], PREFIX[:4])], capture=(0, 1, 2))).hidden
    rest = [Extend(slots[0], PREFIX[4:], range(3, len(PREFIX) - 1)), chunk(slots[1], PREFIX[:3])]
    rows = model.run(Pass(rest, capture=(0, 1, 2))).hidden
    assert first is not None
    assert rows is not None
    wanted = expected(other, PREFIX)
    assert torch.allclose(torch.cat([first, rows]), torch.cat([wanted, wanted[:3]]), atol=2e-4)
    assert model.run(Pass([chunk(slots[1], PREFIX[:1], 3)])).hidden is None
    for slot in slots:
        model.close(slot)


def test_layers_that_do_not_occur_are_refused() -> None:
    model = through_torch()
    for capture in ((5,), (0, -1)):
        with pytest.raises(ConfigurationError, match="choose indices from 0 to 4"):
            model.require_capture(capture)
    slot = filled(model, PREFIX)
    with pytest.raises(ConfigurationError, match="layer 3 cannot be captured: this pass runs layers 0 to 1"):
        model.run(Pass([Extend(slot, [7], [-1])], LayerSubset(end=2), (3,)))
    model.close(slot)


def test_models_that_capture_nothing_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="4 axes from layer to layer"):
        target("gemma3n_text").require_capture((0,))
    with pytest.raises(UnsupportedModelError, match="does not return hidden states"):
        TableLM(hashed(VOCAB_SIZE, seed=1)).require_capture((0,))
