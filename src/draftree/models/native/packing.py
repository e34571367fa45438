"""Values beside packed weights, in the order of the blocks of the C library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.models.native.library import LANES


def packed_bias(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, dtype: torch.dtype, in_turns: bool
) -> Tensor | None:
    """Return the biases of layers that are packed together, float32; None if there are none.

    Args:
        weights: weights of the layers.
        biases: their biases; None for none.
        dtype: dtype of the model, to which biases are rounded.
        in_turns: whether blocks of two layers alternate; otherwise the layers follow each other.
    """
    if all(bias is None for bias in biases):
        return None
    full = [
        torch.zeros(weight.shape[0]) if bias is None else bias.to(dtype).to(torch.float32, copy=True)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    if in_turns:
        return torch.stack([part.reshape(-1, LANES) for part in full], dim=1).flatten().contiguous()
    padding = -sum(part.numel() for part in full) % LANES
    return torch.cat([*full, torch.zeros(padding)])
