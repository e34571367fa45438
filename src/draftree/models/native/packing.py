"""Sizes of packed weights, and values beside them in the order of the blocks of the C library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftree.models.native.blueprint import Blueprint, LinearBlueprint, ScoreBias
from draftree.models.native.library import FORMATS, LANES


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


def by_distance(table: Tensor, bias: ScoreBias) -> Tensor:
    """Return score biases by distance, shape (heads, distances), from a table of shape (buckets, heads)."""
    return table[torch.tensor(bias.buckets)].t().contiguous()


def arranged(parameter: Tensor, linear: LinearBlueprint, *, head_dim: int) -> Tensor:
    """Return a weight of shape (outputs, inputs), or a bias of shape (outputs,), from its parameter.

    Of gate and up the gate comes first; of queries, keys and values all queries, then all keys, then all values.

    Args:
        parameter: weight or bias as the model has it.
        linear: how it is stored.
        head_dim: size of a head.
    """
    is_weight = parameter.dim() > (1 if linear.expert is None else 2)
    found = parameter if linear.expert is None else parameter[linear.expert]
    if linear.is_transposed and is_weight:
        found = found.t()
    if linear.is_interleaved:
        found = torch.cat([found[::2], found[1::2]])
    if linear.groups:
        heads = found.unflatten(0, (linear.groups, -1, head_dim))
        found = torch.cat([part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])])
    return found


def bytes_needed(plan: Blueprint, block_bytes: Callable[[int, int], int], *, kind: int, page: int) -> int:
    """Return the size of all packed weights of a decoder in bytes, each rounded up to a page.

    Args:
        plan: architecture of the decoder.
        block_bytes: size of 16 packed outputs by their number of inputs and their format.
        kind: format of all products but the projection, whose format is that of the decoder's dtype.
        page: alignment of a weight in bytes.
    """
    products = [([plan.head], kind)]
    for layer in plan.layers:
        products += [(list(parts), kind) for parts in (layer.qkv, [layer.output])]
        if layer.source is not None:
            products += [([layer.source.query], kind), ([layer.source.output], kind)]
        if layer.experts is None:
            products += [(list(layer.gate_up), kind), ([layer.down], kind)]
            continue
        experts = layer.experts
        products += experts.count * [([experts.gate_up], kind), ([experts.down], kind)]
        if experts.shared_down is not None:
            products += [(list(experts.shared_gate_up), kind), ([experts.shared_down], kind)]
        gate = [] if experts.shared_gate is None else [experts.shared_gate]
        products.append(([experts.router, *gate], FORMATS[plan.dtype]))
    if plan.projection is not None:
        products.append(([plan.projection.linear], FORMATS[plan.dtype]))
    return sum(
        -(-sum(part.outputs for part in parts) // LANES) * block_bytes(parts[0].inputs, own) + page
        for parts, own in products
    )
