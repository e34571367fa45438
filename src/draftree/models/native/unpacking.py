"""Unpacking of weights from the blocks of the C library (layout: `models/native/csrc/structures.h`)."""

from __future__ import annotations

import torch
from torch import Tensor

from draftree.models.native.library import FORMATS, LANES

UNITS = {FORMATS["bfloat16"]: (16, 2), FORMATS["int8"]: (16, 4)}
"""Groups of inputs in a unit of a block, and inputs in a group; the 16 outputs lie between them."""
TYPES = {FORMATS["float32"]: torch.float32, FORMATS["bfloat16"]: torch.bfloat16, FORMATS["int8"]: torch.int8}


def unpack(packed: Tensor, kind: int, *, inputs: int, outputs: int, scales: Tensor | None) -> Tensor:
    """Return a weight of shape (outputs, inputs), as the pass uses it.

    Args:
        packed: bytes of the blocks.
        kind: format of the blocks.
        inputs: number of inputs of the layer.
        outputs: number of outputs of the layer.
        scales: one for each output of int8 blocks; None otherwise.

    Returns:
        The packed float32 or bfloat16 weight, bit for bit; for int8 the product of weights and scales in float32.
    """
    numbers = packed.view(TYPES[kind])
    blocks = -(-outputs // LANES)
    if kind == FORMATS["float32"]:
        rows = numbers.reshape(blocks, inputs, LANES).transpose(1, 2)
    else:
        groups, size = UNITS[kind]
        rows = numbers.reshape(blocks, -1, groups, LANES, size).permute(0, 3, 1, 2, 4)
    found = rows.reshape(blocks * LANES, -1)[:outputs, :inputs]
    return found.contiguous() if scales is None else found.float() * scales[:outputs, None]
