"""What all packing shares: sizes of packed weights, and weights and biases in the order of the C library's blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.models.native.blueprint import Blueprint, LinearBlueprint, ScoreBias
from draftree.models.native.groups import kinds_of_plan
from draftree.models.native.library import FORMATS, LANES, Library
from draftree.models.native.weights import Weights

PACK_ROWS = 256
"""Number of outputs per packing task."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Weights of a decoder that are being packed, and where the result goes.

    Attributes:
        weights: weights of the decoder, which are not released.
        plan: architecture of the decoder, to whose dtype weights without blocks are rounded first.
        room: returns memory for a product of this size in bytes.
        keep: keeps a tensor as long as the decoder.
        pool: runs packing tasks.
    """

    weights: Weights
    plan: Blueprint
    room: Callable[[int], Tensor]
    keep: Callable[[Tensor], Tensor]
    pool: Executor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoder."""
        found: torch.dtype = getattr(torch, self.plan.dtype)
        return found


def packed_bias(
    outputs: Sequence[int], biases: Sequence[Tensor | None], *, dtype: torch.dtype, in_turns: bool
) -> Tensor | None:
    """Return the biases of layers that are packed together, float32; None if there are none.

    Args:
        outputs: number of outputs of each layer.
        biases: their biases; None for none.
        dtype: dtype of the model, to which biases are rounded.
        in_turns: whether blocks of two layers alternate; otherwise the layers follow each other.
    """
    if all(bias is None for bias in biases):
        return None
    full = [
        torch.zeros(count) if bias is None else bias.to(dtype).to(torch.float32, copy=True)
        for count, bias in zip(outputs, biases, strict=True)
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

    Of gate and up the gate comes first; of queries, keys and values all queries, then all keys, then all values; of
    pairs that rotate together the first number of each, then the second of each.

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
    if linear.pairs:
        heads = found.unflatten(0, (-1, head_dim))
        turned, rest = heads[:, : linear.pairs], heads[:, linear.pairs :]
        found = torch.cat([turned[:, ::2], turned[:, 1::2], rest], dim=1).flatten(0, 1)
    return found


def parts_of(
    source: Weights, linears: Sequence[LinearBlueprint], *, head_dim: int, in_turns: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights and biases of layers that are packed together; one layer in turns is divided into two halves."""
    weights = [arranged(source.get(linear.weight), linear, head_dim=head_dim) for linear in linears]
    biases = [
        None if linear.bias is None else arranged(source.get(linear.bias), linear, head_dim=head_dim)
        for linear in linears
    ]
    if in_turns and len(weights) == 1:
        return list(weights[0].chunk(2)), [None, None] if biases[0] is None else list(biases[0].chunk(2))
    return weights, biases


def pieces_of(weights: Sequence[Tensor], *, in_turns: bool) -> list[tuple[Tensor, int]]:
    """Return parts of weights for packing tasks, each with its first block."""
    step, first = (2, 0) if in_turns else (1, 0)
    pieces: list[tuple[Tensor, int]] = []
    for index, weight in enumerate(weights):
        place = index if in_turns else first
        rows = weight.split(PACK_ROWS)
        pieces += [(part, place + step * number * (PACK_ROWS // LANES)) for number, part in enumerate(rows)]
        first += weight.shape[0] // LANES
    return pieces


def bytes_needed(plan: Blueprint, library: Library, weights: Weights, *, kind: int, page: int) -> int:
    """Return the size of all packed weights of a decoder in bytes, each rounded up to a page.

    Args:
        plan: architecture of the decoder.
        library: packs them.
        weights: weights of the decoder.
        kind: format of all products but the projection, whose format is that of the decoder's dtype.
        page: alignment of a weight in bytes.
    """
    if kind == FORMATS["grouped"]:
        return grouped_bytes(plan, library, weights, page=page)
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
        products.append((list(experts.unquantized), FORMATS[plan.dtype]))
    if plan.projection is not None:
        products.append(([plan.projection.linear], FORMATS[plan.dtype]))
    return sum(
        -(-sum(part.outputs for part in parts) // LANES) * library.block_bytes(parts[0].inputs, own) + page
        for parts, own in products
    )


def grouped_bytes(plan: Blueprint, library: Library, weights: Weights, *, page: int) -> int:
    """Return the size of all packed weights with groups in bytes, each rounded up to a page, and a projection.

    Args:
        plan: architecture of the decoder.
        library: packs them.
        weights: weights of the decoder.
        page: alignment of a weight in bytes.
    """
    names = list(dict.fromkeys(part.weight for layer in plan.layers for part in layer.products))
    blocks = {name: weights.block_kind(name) for name in (*names, plan.head.weight, plan.embedding)}
    given = {name: found for name, found in blocks.items() if found is not None}
    total = sum(
        -(-part.outputs // LANES) * library.groups.block_bytes(part.inputs, kind) + page
        for part, kind in kinds_of_plan(plan, given)
    )
    unquantized = [layer.experts.unquantized for layer in plan.layers if layer.experts is not None]
    unquantized += [] if plan.projection is None else [(plan.projection.linear,)]
    for parts in unquantized:
        blocks_of_all = -(-sum(part.outputs for part in parts) // LANES)
        total += blocks_of_all * library.block_bytes(parts[0].inputs, FORMATS[plan.dtype]) + page
    return total
