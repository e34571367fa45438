"""4-bit weights that are quantized at load: values, memory, starts, weights read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftree.loading import lowering
from draftree.loading.load import load_model
from draftree.loading.native_start import packed_folders
from draftree.loading.references import rounded, with_rounded_inputs
from draftree.models.native.library import HEAD_KIND, LAYER_KIND, library, table_of
from draftree.models.native.model import NativeModel
from draftree.models.native.structures import CLinear
from draftree.models.torch.hf import HFModel
from families import fresh
from native_samples import EXPERTS, FAMILIES, SIZES, in_c, lower, text
from second_starts import logits
from slot_samples import at_once
from streamed import least_budget

pytestmark = [in_c, pytest.mark.usefixtures("store")]


def quantized(weight: torch.Tensor, kind: str = LAYER_KIND) -> torch.Tensor:
    """The values of a weight of shape (outputs, inputs) in 4 or 6 bits."""
    functions, (outputs, inputs) = library().groups, weight.shape
    blocks, size = -(-outputs // 16), functions.block_bytes(inputs, kind)
    table, packed = table_of([kind] * blocks, [size] * blocks), torch.empty(blocks * size, dtype=torch.uint8)
    functions.pack(weight.float().contiguous(), inputs, packed, table)
    linear = CLinear(weight=packed.data_ptr(), blocks=table.data_ptr(), inputs=inputs, outputs=outputs, format=3)
    return library().unpack(linear, outputs)


def quantized_model(family: str) -> Any:
    """A model of transformers whose weights are the values of 4 bits, 6 in embedding and head; without its routers."""
    model = fresh(family, **(SIZES | FAMILIES[family])).eval().requires_grad_(False)
    heads = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or name.endswith(("_bias", "gate.weight", "router.weight")):
            continue
        if weight.dim() == 2:
            weight.copy_(quantized(weight, HEAD_KIND if id(weight) in heads else LAYER_KIND))
            continue
        is_transposed = family == "gpt_oss"
        for expert in weight:
            expert.copy_(quantized(expert.T).T if is_transposed else quantized(expert))
    return model


def in_float32(family: str) -> NativeModel:
    return lower(HFModel(fresh(family, **(SIZES | FAMILIES[family]))), quantization="int4")


@pytest.mark.parametrize("family", EXPERTS)
def test_logits_are_those_of_the_values_of_four_bits(family: str) -> None:
    model, tokens = quantized_model(family), text(12)
    for module in model.modules():  # the first products of experts read rounded inputs, too
        if hasattr(module, "gate_up_proj") and not isinstance(module.gate_up_proj, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))
    with torch.inference_mode(), with_rounded_inputs(model):
        wanted = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    error = (at_once(in_float32(family), tokens) - wanted).pow(2).mean().sqrt()
    assert error < 0.01 * (wanted.max() - wanted.min())


def test_memory_is_that_of_the_bits(folder: Path) -> None:
    loaded = load_model(folder, quantization="int4", dtype="bfloat16")
    plan, groups = loaded.model.blueprint, library().groups  # type: ignore[attr-defined]
    wanted = sum(
        -(-linear.outputs // 16) * groups.block_bytes(linear.inputs, LAYER_KIND)
        for layer in plan.layers
        for linear in layer.linears
    )
    heads = 1 if plan.is_tied else 2
    wanted += heads * -(-plan.vocab // 16) * groups.block_bytes(plan.hidden, HEAD_KIND)
    assert wanted <= loaded.model.footprint.weights < wanted + (32 << 10)
    assert groups.block_bytes(4096, LAYER_KIND) == 16 * 4096 * 4.625 / 8


def test_memory_of_experts_is_that_of_the_bits() -> None:
    ours, groups = in_float32("mixtral"), library().groups
    plan = ours.blueprint
    wanted = sum(
        -(-linear.outputs // 16) * groups.block_bytes(linear.inputs, LAYER_KIND)
        for layer in plan.layers
        for linear in layer.products
    )
    count = sum(layer.experts.count for layer in plan.layers)
    assert wanted > count * 3 * 64 * 96 * 4.6 / 8
    assert ours.footprint.weights < wanted + 2 * plan.vocab * plan.hidden + (count << 12) + (64 << 10)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "gpt_oss"])
def test_a_second_start_quantizes_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(family, **(SIZES | FAMILIES[family])).save_pretrained(tmp_path / "model")
    first = load_model(tmp_path / "model", quantization="int4", dtype="bfloat16")
    monkeypatch.setattr(lowering, "lower_model", lambda *_, **__: pytest.fail("the packed weights are saved"))
    second = load_model(tmp_path / "model", quantization="int4", dtype="bfloat16")
    assert torch.equal(logits(first), logits(second))
    (folder,) = (found for found, _ in packed_folders())
    streamed = load_model(tmp_path / "model", quantization="int4", dtype="bfloat16", offload=least_budget(folder))
    assert streamed.model.streams_weights
    assert torch.equal(logits(first), logits(streamed))
