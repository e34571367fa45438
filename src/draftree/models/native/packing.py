"""Packing of products into the blocks of the C library, and unpacking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftree.models.native.blueprint import Blueprint, LinearBlueprint, ScoreBias
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import (
    FORMATS,
    HEAD_KIND,
    LANES,
    LAYER_KIND,
    GroupFunctions,
    Library,
    RowBlocks,
    address,
    kinds_of_plan,
    table_of,
)
from draftree.models.native.structures import CLinear
from draftree.models.native.weights import Weights

PACK_ROWS = 256  # number of outputs per packing task


@dataclass(frozen=True, slots=True)
class Packing:
    """Weights of a decoder that are being packed, and where the result goes."""

    weights: Weights  # weights of the decoder, which are not released
    plan: Blueprint  # architecture of the decoder, to whose dtype weights without blocks are rounded first
    room: Callable[[int], Tensor]  # returns memory for a product of this size in bytes
    keep: Callable[[Tensor], Tensor]  # keeps a tensor as long as the decoder
    pool: Executor  # runs packing tasks

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.plan.dtype)
        return found


def packed_bias(
    outputs: Sequence[int], biases: Sequence[Tensor | None], *, dtype: torch.dtype, in_turns: bool
) -> Tensor | None:
    """Return the biases of layers that are packed together, float32; in turns, blocks of two layers alternate."""
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
    """Return the size of all packed weights of a decoder in bytes, each rounded up to a page."""
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
    """Return the same for weights with groups."""
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


@dataclass(frozen=True, slots=True)
class LinearPacker:
    library: Library  # packs weights
    packing: Packing  # the decoder's weights, and where the result goes

    def pack(
        self,
        linears: Sequence[LinearBlueprint],
        kind: int,
        *,
        in_turns: bool = False,
        is_one: bool = False,
        first_output: int = 0,
    ) -> CLinear:
        """Pack layers one after the other or, if `in_turns`, in alternating blocks (gate and up)."""
        packing, dtype = self.packing, self.packing.dtype
        inputs, outputs = linears[0].inputs, sum(linear.outputs for linear in linears)
        blocks = -(-outputs // LANES)
        packed = packing.keep(packing.room(blocks * self.library.block_bytes(inputs, kind)))
        is_int8 = kind == FORMATS["int8"]
        scales = packing.keep(torch.zeros(blocks * LANES)) if is_int8 else None
        sums = packing.keep(torch.zeros(blocks * LANES, dtype=torch.int32)) if is_int8 else None
        weights, biases = parts_of(packing.weights, linears, head_dim=packing.plan.head_dim, in_turns=in_turns)
        bias = packed_bias(list(map(len, weights)), biases, dtype=dtype, in_turns=in_turns)
        if bias is not None:
            packing.keep(bias)
        if is_one:
            weights, outputs = [torch.cat(weights)], blocks * LANES
        step = 2 if in_turns else 1
        pack = partial(self.library.pack, packed=packed, kind=kind, step=step, scales=scales, sums=sums)
        pieces = pieces_of(weights, in_turns=in_turns)
        list(packing.pool.map(lambda piece: pack(piece[0].to(dtype), first=piece[1]), pieces))
        beside = (address(scales), address(sums), address(bias), None)
        return CLinear(packed.data_ptr(), *beside, inputs, outputs, kind, first_output)


@dataclass(frozen=True, slots=True)
class GroupedPacker:
    functions: GroupFunctions  # of the C library
    packing: Packing  # the decoder's weights, and where the result goes

    def pack(
        self,
        linears: Sequence[LinearBlueprint],
        *,
        in_turns: bool = False,
        is_head: bool = False,
        first_output: int = 0,
    ) -> CLinear:
        """Pack layers one after the other or, if `in_turns`, in alternating blocks; a head has more bits."""
        inputs = linears[0].inputs
        sources = [source for linear in linears for source in self._sources(linear)]
        biases = [None if linear.bias is None else self._arranged(linear.bias, linear) for linear in linears]
        if in_turns and len(sources) == 1:
            half = len(sources[0]) // 2
            sources = [_part(sources[0], 0, half), _part(sources[0], half, 2 * half)]
        if in_turns and len(biases) == 1:
            biases = [None, None] if biases[0] is None else list(biases[0].chunk(2))
        owners = _owners([-(-len(source) // LANES) for source in sources], in_turns=in_turns)
        own = HEAD_KIND if is_head else LAYER_KIND
        kinds = [source.kind if isinstance(source, RowBlocks) else own for source in sources]
        sizes = [self.functions.block_bytes(inputs, kinds[owner]) for owner in owners]
        table = self.packing.keep(table_of([kinds[owner] for owner in owners], sizes))
        packed = self.packing.keep(self.packing.room(sum(sizes)))
        bias = packed_bias(list(map(len, sources)), biases, dtype=self.packing.dtype, in_turns=in_turns)
        if bias is not None:
            self.packing.keep(bias)
        self._fill(sources, owners, inputs, packed, table)
        outputs = sum(map(len, sources))
        fields = (address(bias), address(table), inputs, outputs, FORMATS["grouped"], first_output)
        return CLinear(packed.data_ptr(), None, None, *fields)

    def _arranged(self, name: str, linear: LinearBlueprint) -> Tensor:
        return arranged(self.packing.weights.get(name), linear, head_dim=self.packing.plan.head_dim)

    def _sources(self, linear: LinearBlueprint) -> Sequence[Tensor | RowBlocks]:
        """Return the weight of a layer; gate and up of an expert in blocks are two."""
        if linear.expert is None:
            whole = self.packing.weights.blocks(linear.weight)
            blocks: Sequence[RowBlocks] | None = None if whole is None else [whole]
        else:
            blocks = self.packing.weights.expert_blocks(linear.weight, linear.expert)
        if blocks is None:
            return [self._arranged(linear.weight, linear)]
        if linear.is_transposed or linear.is_reordered:
            raise NativeUnavailableError(f"the rows of '{linear.weight}' have another order than passes need")
        return blocks

    def _fill(
        self, sources: Sequence[Tensor | RowBlocks], owners: Sequence[int], inputs: int, packed: Tensor, table: Tensor
    ) -> None:
        owner = torch.tensor(owners)
        pieces = []
        for index, source in enumerate(sources):
            own = table[owner == index]
            pieces += [
                (_part(source, first, first + PACK_ROWS), own[first // LANES : (first + PACK_ROWS) // LANES])
                for first in range(0, len(source), PACK_ROWS)
            ]

        def pack(piece: tuple[Tensor | RowBlocks, Tensor]) -> None:
            source, blocks = piece
            if isinstance(source, Tensor):
                source = source.to(self.packing.dtype).contiguous()
            self.functions.pack(source, inputs, packed, blocks.contiguous())

        list(self.packing.pool.map(pack, pieces))


def _part(source: Tensor | RowBlocks, first: int, end: int) -> Tensor | RowBlocks:
    return source.part(first, end) if isinstance(source, RowBlocks) else source[first:end]


def _owners(blocks: Sequence[int], *, in_turns: bool) -> list[int]:
    if in_turns:
        return [source for _ in range(blocks[0]) for source in range(len(blocks))]
    return [source for source, count in enumerate(blocks) for _ in range(count)]


UNITS = {FORMATS["bfloat16"]: (16, 2), FORMATS["int8"]: (16, 4)}
"""Groups of inputs in a unit of a block, and inputs in a group; the 16 outputs lie between them."""
TYPES = {FORMATS["float32"]: torch.float32, FORMATS["bfloat16"]: torch.bfloat16, FORMATS["int8"]: torch.int8}


def unpack(packed: Tensor, kind: int, *, inputs: int, outputs: int, scales: Tensor | None) -> Tensor:
    """Return a packed weight, shape (outputs, inputs): the same bits, or of int8 the product with its scales."""
    numbers = packed.view(TYPES[kind])
    blocks = -(-outputs // LANES)
    if kind == FORMATS["float32"]:
        rows = numbers.reshape(blocks, inputs, LANES).transpose(1, 2)
    else:
        groups, size = UNITS[kind]
        rows = numbers.reshape(blocks, -1, groups, LANES, size).permute(0, 3, 1, 2, 4)
    found = rows.reshape(blocks * LANES, -1)[:outputs, :inputs]
    return found.contiguous() if scales is None else found.float() * scales[:outputs, None]
