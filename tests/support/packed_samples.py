"""Tiny checkpoints of 4 bits, as GPTQ, AWQ and compressed-tensors write them. Not a test itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import fresh

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 400}
GROUP = 64
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP, "symmetric": True}}},
}


def words(codes: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Codes of the last dimension in 32-bit words; place i of a word has its code number order[i]."""
    parts = codes.long().unflatten(-1, (-1, 8))
    whole = torch.stack([parts[..., one] << 4 * place for place, one in enumerate(order)]).sum(0)
    return whole.where(whole < 1 << 31, whole - (1 << 32)).to(torch.int32)


def rounded(weight: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (outputs, inputs), scales and zeros (outputs, groups)."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = groups.abs().amax(-1) / 7.5 if symmetric else (high - low) / 15
    scales = scales.half().float()
    zeros = torch.full_like(scales, 8) if symmetric else (-low / scales).round().clamp(1, 15)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.flatten(1), scales, zeros


def gptq(stem: str, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        f"{stem}qweight": words(codes).T.contiguous(),
        f"{stem}qzeros": words((zeros - 1).T),
        f"{stem}scales": scales.T.half().contiguous(),
        f"{stem}g_idx": (torch.arange(codes.shape[1]) // GROUP).int(),
    }


def awq(stem: str, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{stem}qweight": words(codes.T, order),
        f"{stem}qzeros": words(zeros.T, order),
        f"{stem}scales": scales.T.half().contiguous(),
    }


def compressed(stem: str, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        f"{stem}weight_packed": words(codes),
        f"{stem}weight_scale": scales.half(),
        f"{stem}weight_zero_point": words(zeros.T).T.contiguous(),
        f"{stem}weight_shape": torch.tensor(codes.shape),
    }


def packed_folder(
    where: Path,
    settings: dict[str, Any],
    pack: Callable[..., dict[str, Tensor]],
    *,
    symmetric: bool,
    family: str = "llama",
    **changes: Any,
) -> tuple[Path, Any]:
    """A packed checkpoint, and the model of the values that it stands for."""
    model = fresh(family, **(SIZES | changes))
    folder = where / "packed"
    model.save_pretrained(folder)
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "layers" not in name or weight.dim() != 2:
            found[name] = weight
            continue
        codes, scales, zeros = rounded(weight, symmetric=symmetric)
        found |= pack(name.removesuffix("weight"), codes, scales, zeros)
        values = scales.repeat_interleave(GROUP, 1) * (codes - zeros.repeat_interleave(GROUP, 1))
        with torch.no_grad():
            model.get_parameter(name).copy_(values)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}), "utf-8")
    return folder, model
