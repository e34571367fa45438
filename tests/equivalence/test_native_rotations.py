"""Neighbours that rotate together, layers without rotation, and norms of all heads: found by values, run in C."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.lowering import plan_model
from draftree.models.native.model import NativeModel
from draftree.models.native.queries import Rotation, rotations
from draftree.models.native.rotary import Rope
from draftree.models.native.shares import TeamMemory, divide
from draftree.models.native.twins import UnpackedWeights
from draftree.models.torch.hf import HFModel
from families import fresh
from native_samples import FAMILIES, SIZES, native, text
from slot_samples import alone, at_once

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")

PAIRED = {"cohere": 16, "cohere2": 16, "glm": 8, "glm4": 8, "helium": 16, "ernie4_5": 16}
"""Numbers of each head that rotate, by family."""
PARTLY = ("cohere2", "exaone4")
"""Families whose layers without a window have no positions."""


def model_of(family: str, **others: Any) -> Any:
    return fresh(family, **(SIZES | FAMILIES[family] | others))


def kinds(model: Any) -> list[Rotation]:
    facts, plan = HFModel(model), plan_model(model)
    return rotations(facts, model.model.layers, plan.ropes, [0] * len(plan.layers))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "phi3", "olmo2", "nemotron", *PAIRED, *PARTLY])
def test_rotations_are_found_by_values(family: str) -> None:
    usual = Rotation.PAIRS if family in PAIRED else Rotation.HALVES
    expected = [usual, Rotation.NONE if family in PARTLY else usual]
    assert kinds(model_of(family)) == expected
    assert [layer.rope is None for layer in native(family).blueprint.layers] == [
        one is Rotation.NONE for one in expected
    ]
    found = {linear.pairs for layer in native(family).blueprint.layers for linear in layer.qkv}
    assert found == ({0, PAIRED[family]} if family in PAIRED else {0})


def test_two_heads_are_not_taken_for_two_rows() -> None:
    model = model_of("exaone4", num_attention_heads=2, num_key_value_heads=1)
    assert kinds(model) == [Rotation.HALVES, Rotation.NONE]


def test_queries_that_no_rotation_explains_are_taken_to_rotate_in_the_usual_way() -> None:
    model = model_of("llama")
    frequencies = HFModel(model).model.model.rotary_emb.inv_freq
    wrong = [Rope(tuple((2.5 * frequencies).tolist()), 3.0)]
    assert rotations(HFModel(model), model.model.layers, wrong, [0, 0]) == [Rotation.HALVES] * 2


def test_neighbours_that_rotate_behind_norms_of_heads_are_refused() -> None:
    with pytest.raises(NativeUnavailableError, match="behind norms of heads"):
        plan_model(model_of("cohere", use_qk_norm=True))


@pytest.mark.parametrize("family", ["cohere2", "glm4", "olmo2"])
def test_unpacked_weights_make_the_same_model(family: str) -> None:
    ours, tokens = native(family, "bfloat16"), text(40)
    again = NativeModel(ours.blueprint.as_unpacked(), UnpackedWeights(ours.blueprint, ours.decoder))
    assert torch.equal(at_once(again, tokens), alone(ours, tokens))


@pytest.mark.parametrize(("family", "reason"), [("cohere", "in another order"), ("olmo2", "all heads together")])
def test_they_are_not_divided(family: str, reason: str) -> None:
    with pytest.raises(NativeUnavailableError, match=reason):
        divide(native(family).blueprint, 0, 2, TeamMemory.create())
