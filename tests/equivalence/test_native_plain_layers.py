"""Decoders with biases, norms with a mean, perceptrons without a gate and learned positions run in C."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend, Pass
from draftree.models.native import decoder
from draftree.models.native.blueprint import GELU, GELU_TANH, LAYER_NORM, QUICK_GELU, RELU, SILU
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.lowering import plan_lowering
from draftree.models.native.model import NativeModel
from draftree.models.native.shares import TeamMemory, divide
from draftree.models.torch.hf import HFModel
from families import fresh
from native_builds import BUILDS, built
from native_samples import DTYPES, FAMILIES, SIZES, lowered, native, text
from slot_samples import alone, at_once, filled

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")

ACTIVATIONS = {"gelu": GELU, "gelu_new": GELU_TANH, "quick_gelu": QUICK_GELU, "relu": RELU, "silu": SILU}
AFTER: dict[str, Any] = {"do_layer_norm_before": False}


def logits_of(family: str, tokens: list[int], **others: Any) -> torch.Tensor:
    peer = fresh(family, **(SIZES | FAMILIES[family] | others))
    with torch.inference_mode():
        found: torch.Tensor = peer(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return found


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_that_of_transformers(name: str) -> None:
    lm, tokens = lowered("gpt2", activation_function=name), text(60)
    wanted = logits_of("gpt2", tokens, activation_function=name)
    assert lm.blueprint.activation == ACTIVATIONS[name]
    assert (at_once(lm, tokens) - wanted).abs().max() < 2e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("kind", DTYPES)
def test_every_set_of_instructions_agrees(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(name)
    monkeypatch.setattr(decoder, "library", lambda: library)
    lm, tokens = lowered("gpt2", kind), text(70)
    rows = alone(lm, tokens)
    assert torch.equal(at_once(lm, tokens), rows)
    spread = rows.max() - rows.min()
    assert (rows - alone(native("gpt2", kind), tokens)).pow(2).mean().sqrt() < 0.01 * spread


@pytest.mark.parametrize("kind", DTYPES)
def test_norms_after_the_sublayers(kind: str) -> None:
    lm, tokens = lowered("opt", kind, **AFTER), text(100)
    wanted, found = logits_of("opt", tokens, **AFTER), at_once(lm, tokens)
    assert lm.blueprint.is_post_norm
    limit = {"float32": 2e-5, "bfloat16": 0.02, "int8": 0.08, "int4": 0.15}[kind]
    assert (found - wanted).pow(2).mean().sqrt() < limit * (wanted.max() - wanted.min())
    assert torch.equal(found, alone(lm, tokens))


def test_hidden_states_of_a_model_with_norms_after_its_sublayers_are_refused() -> None:
    lm = lowered("opt", **AFTER)
    slot = filled(lm, text(3))
    with pytest.raises(UnsupportedModelError, match="norms after its sublayers"):
        lm.run(Pass([Extend(slot, [5], [-1])], capture=(1,)))


def test_a_position_after_the_table_is_after_the_context() -> None:
    assert lowered("opt", max_position_embeddings=37).max_length == 37
    assert lowered("gpt2", max_position_embeddings=37).max_length == 37


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_the_blueprint_is_found_by_structure(family: str) -> None:
    plan = native(family).blueprint
    assert (plan.norm, plan.has_norm_bias, plan.is_gated, plan.is_post_norm) == (LAYER_NORM, True, False, False)
    assert plan.position_offset == {"gpt2": 0, "opt": 2}[family]
    assert plan.layers[0].scaling == 0.25


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_copy_with_fewer_bits_is_the_model_with_fewer_bits(family: str) -> None:
    target, tokens = native(family, "bfloat16"), text(40)
    copy: Any = target.quantized_copy("int8")
    twin = NativeModel(copy._decoder._blueprint, copy._decoder)
    assert torch.equal(at_once(twin, tokens), at_once(native(family, "int8"), tokens))


def test_transposed_weights_and_norms_after_sublayers_are_not_divided() -> None:
    for family, others in (("gpt2", {}), ("opt", AFTER)):
        plan = plan_lowering(HFModel(fresh(family, **(SIZES | FAMILIES[family] | others))))
        with pytest.raises(NativeUnavailableError, match="is not divided"):
            divide(plan, 0, 2, TeamMemory.create())


def test_a_projection_of_the_embedding_is_refused() -> None:
    model = fresh("opt", **(SIZES | FAMILIES["opt"] | {"word_embed_proj_dim": 32}))
    with pytest.raises(NativeUnavailableError, match="unknown use"):
        plan_lowering(HFModel(model))
