"""Heads whose files have weights in 8 or 4 bits are read as their products with the scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from block_samples import EAGLE_3, config_of, random_head
from draftree.core.errors import ModelLoadError, UnsupportedModelError
from draftree.heads.folders import check_head, read_config, read_head, write_head
from packed_samples import AWQ, COMPRESSED, GPTQ, GROUP, awq, compressed, gptq, rounded

F8 = torch.float8_e4m3fn
PRODUCT = "layers.0.mlp.up_proj.weight"


def one_scale(rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale = (rows / 0.25).to(F8), torch.tensor(0.25)
    return {"": codes, "_scale": scale, "|input_scale": scale.clone()}, codes.float() * scale


def row_scales(rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = rows.abs().amax(1, keepdim=True) / 127
    codes = (rows / scales).round().to(torch.int8)
    return {"": codes, "_scale": scales}, codes.float() * scales


def group_scales(rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = torch.rand(len(rows), 2, generator=torch.Generator().manual_seed(3)) + 0.5
    wide = scales.repeat_interleave(rows.shape[1] // 2, 1)
    codes = (rows / wide).to(F8)
    return {"": codes, "_scale": scales}, codes.float() * wide


def blocks(rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 10 rows and 8 columns; the last ones are cut."""
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(3)) + 0.5
    wide = scales.repeat_interleave(10, 0)[:24].repeat_interleave(8, 1)
    codes = (rows / wide).to(F8)
    return {"": codes, "_scale_inv": scales}, codes.float() * wide


FORMS: dict[str, Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]] = {
    "one scale": one_scale, "row scales": row_scales, "group scales": group_scales, "blocks": blocks,
}  # fmt: skip


def written(form: str, folder: Path) -> Tensor:
    """Write a head with one quantized product; return what it stands for."""
    write_head(random_head(config_of(EAGLE_3)), folder)
    tensors = load_file(folder / "model.safetensors")
    parts, product = FORMS[form](tensors.pop(PRODUCT))
    base = PRODUCT.removesuffix("weight")
    tensors |= {base + end[1:] if end.startswith("|") else PRODUCT + end: part for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [10, 8]}
    (folder / "config.json").write_text(json.dumps(values))
    return product


@pytest.mark.parametrize("form", FORMS)
def test_quantized_products_are_read(form: str, tmp_path: Path) -> None:
    product = written(form, tmp_path)
    found = read_head(tmp_path, dtype=torch.float32).state_dict()
    check_head(tmp_path)
    assert torch.equal(found[PRODUCT], product.bfloat16().float())
    others = random_head(config_of(EAGLE_3)).state_dict()
    assert all(torch.equal(found[name], part) for name, part in others.items() if name != PRODUCT)


@pytest.mark.parametrize(
    ("shape", "form"),
    [((5,), "row scales"), ((24, 5), "group scales"), ((24, 0), "group scales"), ((2, 2), "blocks")],
)
def test_scales_of_other_shapes_are_refused(shape: tuple[int, ...], form: str, tmp_path: Path) -> None:
    written(form, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ending = "_scale_inv" if form == "blocks" else "_scale"
    save_file({**tensors, PRODUCT + ending: torch.ones(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"the scales 'layers\.0\.mlp\.up_proj\.weight_scale.* do not fit"):
        read_head(tmp_path)


def test_float8_without_scales_and_scales_of_integers_are_refused(tmp_path: Path) -> None:
    written("one scale", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = PRODUCT + "_scale"
    for scales, words in (
        (None, f"'{PRODUCT}' is float8 without scales"),
        (torch.ones(24, 1).byte(), f"'{key}' do not"),
    ):
        others = {name: part for name, part in tensors.items() if name != key}
        save_file(others if scales is None else {**others, key: scales}, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=words):
            read_head(tmp_path)


@pytest.mark.parametrize("block", ["128", [10], [0, 8], [1.5, 8]])
def test_blocks_that_are_no_sizes_are_refused(block: object, tmp_path: Path) -> None:
    written("blocks", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"]["weight_block_size"] = block
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"weight_block_size=.* two positive integers"):
        read_head(tmp_path)


METHODS = {"gptq": (GPTQ, gptq), "awq": (AWQ, awq), "compressed-tensors": (COMPRESSED, compressed)}


def packed(method: str, folder: Path) -> dict[str, Tensor]:
    """Write a head of EAGLE-3 whose layer has 4 bits; return the products that its matrices stand for."""
    settings, stored = METHODS[method]
    config = config_of(EAGLE_3).changed(hidden=128, target_hidden=128, head_dim=32, intermediate=128)
    write_head(random_head(config), folder)
    tensors, products = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.startswith("layers.") and name.endswith("proj.weight")]:
        codes, scales, zeros = rounded(tensors.pop(name), symmetric=method == "compressed-tensors")
        tensors |= stored(name.removesuffix("weight"), codes, scales, zeros)
        products[name] = ((codes.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales[..., None]).flatten(1)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": settings}))
    return products


@pytest.mark.parametrize("method", METHODS)
def test_matrices_of_4_bits_are_read(method: str, tmp_path: Path) -> None:
    products = packed(method, tmp_path)
    assert len(products) == 7
    config = read_config(tmp_path)
    assert (config.kind, config.attention_bias) == ("eagle3", False)
    found = read_head(tmp_path, dtype=torch.float32).state_dict()
    check_head(tmp_path)
    for name, product in products.items():
        torch.testing.assert_close(found[name], product, rtol=0.01, atol=1e-3)


def test_matrices_of_4_bits_that_cannot_be_unpacked_are_refused(tmp_path: Path) -> None:
    packed("gptq", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"]["desc_act"] = True
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match="groups in another order of inputs"):
        read_head(tmp_path)
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="no quantization_config"):
        read_head(tmp_path)
