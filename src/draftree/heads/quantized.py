"""Quantized tensors in the files of heads: read as bfloat16, and written in our own form.

* ours: int8 matrices with one scale per row, `NAME.int8_scale`.
* compressed-tensors: float8 or int8 with `NAME_scale`: one number, one per row, or one per group of a row.
* float8 in blocks, as DeepSeek and Qwen publish them, with `NAME_scale_inv`.

Scales of activations, keys and values are left out: activations are not quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError

OURS, SCALE, INVERSE = ".int8_scale", "_scale", "_scale_inv"
"""Added to the name of a tensor for its scales; `weight_scale_inv` is a factor too."""
UNUSED = ("input_scale", "k_scale", "v_scale", "input_zero_point", "activation_scale")
"""Last parts of the names of scales that are not of weights."""
BLOCK = (128, 128)
"""Rows and columns of a block of float8 unless the configuration names others."""
LARGEST = 127


def packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a finite matrix as int8 with float32 scales of its rows, by their names in the file."""
    scales = (tensor.float().abs().amax(dim=1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    rounded = (tensor.float() / scales[:, None]).round().clamp(-LARGEST, LARGEST)
    return {name: rounded.to(torch.int8), name + OURS: scales}


def expanded(tensors: Mapping[str, Tensor], block: Any = BLOCK) -> dict[str, Tensor]:
    """Return the tensors of a file with quantized ones in bfloat16 and without scales.

    Raises:
        ModelLoadError: scales have no tensor in 8 bits, or do not fit to its shape; float8 without scales; no `block`.
    """
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ModelLoadError(f"its configuration has weight_block_size={block!r}: it must be two positive integers")
    result = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in UNUSED}
    for key in [name for name in result if name.endswith((OURS, SCALE, INVERSE))]:
        ending = next(ending for ending in (OURS, INVERSE, SCALE) if key.endswith(ending))
        name = key.removesuffix(ending)
        rows = result.get(name)
        if rows is None and ending == SCALE:
            continue  # another parameter, whose reader reports it
        stored = result.pop(key)
        if rows is None or rows.itemsize != 1 or rows.dim() != 2 or not stored.is_floating_point():
            raise ModelLoadError(f"the scales '{key}' do not fit to a tensor '{name}' in 8 bits: get the head again")
        scales = _spread(key, stored.float(), rows, block if ending == INVERSE else None)
        result[name] = (rows.float() * scales).bfloat16()
    if bare := next((name for name, part in result.items() if part.is_floating_point() and part.itemsize == 1), None):
        raise ModelLoadError(f"'{bare}' is float8 without scales: get the head again")
    return result


def _spread(key: str, scales: Tensor, rows: Tensor, block: Sequence[int] | None) -> Tensor:
    """Return scales that multiply a matrix."""
    height, width = rows.shape
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if block is None:
        grid = scales[:, None] if scales.dim() == 1 else scales
        if grid.dim() == 2 and grid.shape[0] == height and grid.numel() and width % grid.shape[1] == 0:
            return grid.repeat_interleave(width // grid.shape[1], dim=1)
    elif scales.shape == (-(-height // block[0]), -(-width // block[1])):
        return scales.repeat_interleave(block[0], 0)[:height].repeat_interleave(block[1], 1)[:, :width]
    raise ModelLoadError(
        f"the scales '{key}' of shape {tuple(scales.shape)} do not fit to a tensor of shape {tuple(rows.shape)}: get "
        "the head again"
    )
