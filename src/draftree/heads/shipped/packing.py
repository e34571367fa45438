"""Tensors in 8 bits in files of heads: one scale for each row, expanded when a head is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError

__all__ = ["SCALE", "expanded", "packed"]

SCALE = ".int8_scale"
"""Added to the name of a tensor for its scales."""
LARGEST = 127


def packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a matrix as int8 with float32 scales of its rows, by their names in the file.

    Args:
        name: name of the matrix.
        tensor: shape (rows, columns), finite.
    """
    scales = (tensor.float().abs().amax(dim=1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    rounded = (tensor.float() / scales[:, None]).round().clamp(-LARGEST, LARGEST)
    return {name: rounded.to(torch.int8), name + SCALE: scales}


def expanded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file with packed ones in bfloat16 and without scales.

    Raises:
        ModelLoadError: scales do not fit to a tensor.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for key in tensors.keys() - found.keys():
        name, scales = key.removesuffix(SCALE), tensors[key]
        rows = found.get(name)
        if rows is None or rows.dtype != torch.int8 or scales.shape != rows.shape[:1]:
            raise ModelLoadError(f"the scales '{key}' do not fit to a tensor '{name}' in 8 bits: get the head again")
        found[name] = (rows.float() * scales[:, None].float()).to(torch.bfloat16)
    return found
