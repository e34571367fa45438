"""The self-check of 4-bit weights: its reference reads the packed weights, so that small mistakes show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from block_kinds import rounded_inputs
from draftree.loading import references
from draftree.loading.load import load_model
from draftree.loading.lowering import lower_encoder_decoder, lower_model
from draftree.loading.native_start import packed_folders, remove_packed
from draftree.loading.references import ROUNDED_TOLERANCE, PackedExperts, packed_reference, rounded, whole_reference
from draftree.models.check import QUANTIZED_TOLERANCE, check, reference_logits
from draftree.models.native.build import NativeMismatchError
from draftree.models.native.describe import plan_model
from draftree.models.native.model import NativeModel, UnpackedWeights
from draftree.models.native.weights import ModelWeights
from families import fresh
from native_samples import FAMILIES, SIZES, in_c
from native_seq2seq import FAMILIES as SOURCED
from native_seq2seq import model_of
from streamed import least_budget, sizes

pytestmark = in_c


def packed(family: str, dtype: torch.dtype, **sizes: Any) -> tuple[Any, NativeModel]:
    model = fresh(family, dtype=dtype, **(SIZES | FAMILIES[family] | sizes)).eval().requires_grad_(False)
    return model, NativeModel(plan_model(model), ModelWeights(model), quantization="int4")


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_are_those_of_the_packed_weights_and_rounded_inputs(family: str) -> None:
    # after a tie (below), a router may choose another expert: here, this family always chooses all
    model, ours = packed(family, torch.float32, **({"num_experts_per_tok": 6} if family == "flex_olmo" else {}))
    reference = packed_reference(model, ours)
    assert reference is not None
    found = check(ours, reference)
    # packed embeddings, read without a norm, have many values in the middle of two codes of inputs: ties go either way
    has_ties = ours.blueprint.layers[0].attention_norm is None
    assert max(found.chain_error, found.tree_error) < (2e-2 if has_ties else 1e-3)
    assert found.is_exact


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_fewer_bits_stay_within_the_tolerance(family: str) -> None:
    model, ours = packed(family, torch.bfloat16)
    reference = packed_reference(model, ours)
    assert reference is not None
    found = check(ours, reference)
    assert max(found.chain_error, found.tree_error) < 0.3 * ROUNDED_TOLERANCE


@pytest.mark.parametrize("share", [1e-2, 5e-1])
def test_a_slightly_wrong_pass_is_refused(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that the rounding of the weights hides: one product of one layer is too large."""
    build = references.UnpackedWeights

    class Changed(build):  # type: ignore[misc, valid-type]
        def get(self, name: str) -> torch.Tensor:
            found: torch.Tensor = super().get(name)
            return found * (1 + share) if name == "model.layers.0.mlp.down_proj.weight" else found

    monkeypatch.setattr(references, "UnpackedWeights", Changed)
    model, ours = packed("llama", torch.float32)
    reference = packed_reference(model, ours)
    assert reference is not None
    error = check(ours, reference).chain_error
    assert 1e-4 < error < QUANTIZED_TOLERANCE["int4"]
    if share == 5e-1:
        with pytest.raises(NativeMismatchError, match="those of the same 4-bit weights"):
            lower_model(fresh("llama", **(SIZES | FAMILIES["llama"])), quantization="int4")


def test_the_result_of_the_check_is_that_of_the_packed_weights() -> None:
    loaded = lower_model(fresh("llama", **(SIZES | FAMILIES["llama"])), quantization="int4")
    found = loaded.model.self_check
    assert found is not None
    assert found.tolerance == ROUNDED_TOLERANCE
    assert found.chain_error < 1e-3
    assert found.is_exact


@pytest.mark.parametrize("size", [16, 32, 176])
def test_inputs_are_rounded_as_in_the_products(size: int) -> None:
    rows = torch.randn(5, size, generator=torch.Generator().manual_seed(3))
    rows[1] = 0
    rows[2] *= 1e-3
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True).clamp(min=1e-30))
    wanted = rounded_inputs(rows)
    wanted[1] = 0
    assert (rounded(normed).double() - wanted).abs().max() < 1e-5
    assert torch.equal(rounded(rows)[1], torch.zeros(size))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_a_wrong_expert_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = PackedExperts._product
    monkeypatch.setattr(PackedExperts, "_product", lambda self, name, inputs: 1.6 * own(self, name, inputs))
    model, ours = packed(family, torch.float32)
    reference = packed_reference(model, ours)
    assert reference is not None
    assert check(ours, reference).chain_error > ROUNDED_TOLERANCE


@pytest.mark.parametrize("name", SOURCED)
def test_decoders_with_sources_are_those_of_the_packed_weights(name: str) -> None:
    assert lowered_with_sources(name, torch.float32) < 0.1 * ROUNDED_TOLERANCE
    assert lowered_with_sources(name, torch.bfloat16) < 0.3 * ROUNDED_TOLERANCE


def lowered_with_sources(name: str, dtype: torch.dtype) -> float:
    ours = lower_encoder_decoder(model_of(name, dtype=dtype), name, quantization="int4")
    assert ours.self_check is not None
    assert ours.self_check.tolerance == ROUNDED_TOLERANCE
    return max(ours.self_check.chain_error, ours.self_check.tree_error)


def test_a_wrong_product_with_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "ROUNDED_TOLERANCE", 0.01)  # random models differ little, trained ones more
    lower_encoder_decoder(model_of("bart"), "bart", quantization="int4")
    own = UnpackedWeights.get

    def changed(self: Any, name: str) -> torch.Tensor:
        return own(self, name) * (4 if name.endswith(("out_proj.weight", "fc2.weight")) else 1)

    monkeypatch.setattr(references.UnpackedWeights, "get", changed)
    with pytest.raises(NativeMismatchError, match="those of the same 4-bit weights"):
        lower_encoder_decoder(model_of("bart"), "bart", quantization="int4")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_streamed_weights_are_compared_with_themselves(family: str, tmp_path: Path, store: Path) -> None:
    fresh(family, **sizes(family)).save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "quantization": "int4"}
    load_model(tmp_path / "model", **options)
    (folder,) = (found for found, _ in packed_folders())
    budget = least_budget(folder)
    remove_packed()
    loaded = load_model(tmp_path / "model", **options, offload=budget)
    assert loaded.model.streams_weights
    found = loaded.model.self_check
    assert found is not None
    assert found.tolerance == ROUNDED_TOLERANCE
    assert found.chain_error < 1e-3
    assert loaded.model.is_exact


def test_the_reference_of_shares_leaves_the_model_as_it_is() -> None:
    model = fresh("llama", **(SIZES | FAMILIES["llama"])).eval().requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rough = reference_logits(model)
    plan = plan_model(model)
    found, tolerance = whole_reference(model, plan, rough)
    assert tolerance == ROUNDED_TOLERANCE
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = reference_logits(model)
    assert all(torch.equal(again.logits[branch], rough.logits[branch]) for branch in rough.logits)
    wanted = packed_reference(model, NativeModel(plan, ModelWeights(model), quantization="int4"))
    assert wanted is not None
    assert all(torch.equal(found.logits[branch], wanted.logits[branch]) for branch in wanted.logits)
