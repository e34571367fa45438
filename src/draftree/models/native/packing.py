"""Packing of products into the blocks of the C library, and unpacking."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from draftree.models.native.blueprint import Blueprint, LinearBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import (
    FORMATS,
    HEAD_KIND,
    LANES,
    LAYER_KIND,
    Library,
    RowBlocks,
    address,
    lookup_of,
    table_of,
)
from draftree.models.native.structures import CLinear
from draftree.models.native.weights import Weights

PACK_ROWS = 256  # number of outputs per packing task
MOST_EXCEPTIONS = 1e-3  # largest share of weights that have no code of 12 bits, each of which takes longer than a code


def arranged(parameter: Tensor, linear: LinearBlueprint, *, head_dim: int) -> Tensor:
    """Return a weight of shape (outputs, inputs), or a bias of shape (outputs,), from its parameter.

    Of gate and up the gate comes first; of queries, keys and values all queries, then all keys, then all values; of
    pairs that rotate together the first number of each, then the second of each.
    """
    is_weight = parameter.dim() > (1 if linear.expert is None else 2)
    rows = parameter if linear.expert is None else parameter[linear.expert]
    if linear.is_transposed and is_weight:
        rows = rows.t()
    if (part := linear.part) is not None:
        rows = rows.unflatten(0, (part.groups, -1))[:, part.first : part.end].flatten(0, 1)
    if linear.is_interleaved:
        rows = torch.cat([rows[::2], rows[1::2]])
    if linear.groups:
        heads = rows.unflatten(0, (linear.groups, -1, head_dim))
        rows = torch.cat([part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])])
    if linear.pairs:
        heads = rows.unflatten(0, (-1, linear.unpaired + linear.pairs if linear.unpaired else head_dim))
        first, turned, rest = heads.tensor_split([linear.unpaired, linear.unpaired + linear.pairs], dim=1)
        rows = torch.cat([first, turned[:, ::2], turned[:, 1::2], rest], dim=1).flatten(0, 1)
    return rows


def bytes_needed(plan: Blueprint, library: Library, weights: Weights, *, kind: int, page: int) -> int:
    """Return an upper bound of the size of all packed weights of a decoder in bytes, each rounded up to a page."""

    def size(part: LinearBlueprint, block_bytes: int) -> int:
        return -(-part.outputs // LANES) * block_bytes + page

    kind_of = functools.cache(weights.block_kind)
    parts = [(part, LAYER_KIND) for layer in plan.layers for part in layer.products]
    parts += [] if plan.fusion is None else [(plan.fusion.linear, LAYER_KIND)]
    parts.append((plan.head, HEAD_KIND))
    if kind == FORMATS["grouped"]:
        parts += [] if plan.is_tied else [(lookup_of(plan), HEAD_KIND)]
        block_bytes = [
            library.groups.block_bytes(part.inputs, kind_of(part.weight) or default) for part, default in parts
        ]
    else:
        block_bytes = [library.block_bytes(part.inputs, kind) for part, _ in parts]
    sizes = [size(part, num_bytes) for (part, _), num_bytes in zip(parts, block_bytes, strict=True)]
    unquantized = [part for layer in plan.layers if layer.experts is not None for part in layer.experts.unquantized]
    unquantized += [] if plan.projection is None else [plan.projection.linear]
    return sum(sizes) + sum(size(part, library.block_bytes(part.inputs, FORMATS[plan.dtype])) for part in unquantized)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs products of one decoder, whose weights are not released."""

    library: Library
    weights: Weights
    dtype: torch.dtype  # to which weights without blocks are rounded first
    head_dim: int
    room: Callable[[int], Tensor]  # returns free memory for a product of this size in bytes
    keep: Callable[[Tensor], Tensor]  # keeps a tensor, and the memory of a product, as long as the decoder
    pool: Executor  # runs packing tasks

    def pack(
        self,
        linears: Sequence[LinearBlueprint],
        kind: int,
        *,
        in_turns: bool = False,
        is_head: bool = False,
        is_one: bool = False,
        is_joint: bool = False,
        first_output: int = 0,
    ) -> CLinear:
        """Pack layers one after the other or, if `in_turns`, in alternating blocks; a grouped head has more bits.

        Each of several layers starts in a block of its own, unless `is_one`. If `is_joint`, their results are added:
        their inputs lie side by side.
        """
        if is_joint and len(linears) > 1:
            return self._joint(linears, kind, first_output=first_output)
        if kind == FORMATS["grouped"]:
            return self._grouped(linears, in_turns=in_turns, is_head=is_head, first_output=first_output)
        inputs, outputs = linears[0].inputs, sum(linear.outputs for linear in linears)
        blocks = sum(-(-linear.outputs // LANES) for linear in linears) if not is_one else -(-outputs // LANES)
        packed = self.room(blocks * self.library.block_bytes(inputs, kind))
        is_int8 = kind == FORMATS["int8"]
        scales = self.keep(torch.zeros(blocks * LANES)) if is_int8 else None
        sums = self.keep(torch.zeros(blocks * LANES, dtype=torch.int32)) if is_int8 else None
        weights = [self._arranged(linear.weight, linear) for linear in linears]
        if len(weights) > 1 and not in_turns and not is_one:
            weights, outputs = list(map(_filled_up, weights)), blocks * LANES
        if in_turns and len(weights) == 1:
            weights = list(weights[0].chunk(2))
        bias = self._bias(linears, list(map(len, weights)), in_turns=in_turns)
        if is_one:
            weights, outputs = [torch.cat(weights)], blocks * LANES
        step = 2 if in_turns else 1
        pieces: list[tuple[Tensor, int]] = []  # parts of the weights, and the first block of each
        first = 0
        for index, weight in enumerate(weights):
            start = index if in_turns else first
            rows = weight.split(PACK_ROWS)
            pieces += [(part, start + step * number * (PACK_ROWS // LANES)) for number, part in enumerate(rows)]
            first += weight.shape[0] // LANES
        pack = partial(self.library.pack, packed=packed, kind=kind, step=step, scales=scales, sums=sums)
        list(self.pool.map(lambda piece: pack(piece[0].to(self.dtype), first=piece[1]), pieces))
        table = None
        if kind == FORMATS["bfloat16"]:
            packed, sums, table = self._compact(packed, inputs, blocks)
        beside = (address(scales), address(sums), address(bias), address(table))
        return CLinear(self.keep(packed).data_ptr(), *beside, inputs, outputs, kind, first_output)

    def _compact(self, packed: Tensor, inputs: int, blocks: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return packed blocks in bfloat16 in 12 bits, in their own memory, with their high bytes and exceptions.

        They stay as they are, and the others are None, if too many weights are exceptions, or where it does not pay.
        """
        if not self.library.keeps_compact:
            return packed, None, None
        high_bytes = torch.empty(blocks * 64, dtype=torch.uint8)
        counts = torch.empty(blocks, dtype=torch.int64)
        step = PACK_ROWS // LANES
        pieces = [(first, min(first + step, blocks)) for first in range(0, blocks, step)]

        def measure(piece: tuple[int, int]) -> None:
            self.library.measure_blocks(packed, inputs, piece[0], piece[1], high_bytes, counts)

        def compact(piece: tuple[int, int]) -> None:
            self.library.compact_blocks(packed, inputs, piece[0], piece[1], high_bytes, table)

        list(self.pool.map(measure, pieces))
        if (exceptions := int(counts.sum())) > len(packed) // 2 * MOST_EXCEPTIONS:
            return packed, None, None
        table = torch.empty(blocks + 1 + exceptions, dtype=torch.int64)
        table[0] = blocks + 1
        table[1 : blocks + 1] = blocks + 1 + counts.cumsum(0)
        list(self.pool.map(compact, pieces))
        size = len(packed) // blocks
        for first, end in pieces:
            to, source = packed.data_ptr() + first * size * 3 // 4, packed.data_ptr() + first * size
            ctypes.memmove(to, source, (end - first) * size * 3 // 4)
        return packed[: len(packed) * 3 // 4], self.keep(high_bytes), self.keep(table)

    def _joint(self, linears: Sequence[LinearBlueprint], kind: int, *, first_output: int) -> CLinear:
        whole = LinearBlueprint(linears[0].weight, None, sum(part.inputs for part in linears), linears[0].outputs)
        blocks = [self.weights.blocks(linear.weight) for linear in linears if linear.factor == 1.0]
        alike = [part for part in blocks if part is not None and part.kind == getattr(blocks[0], "kind", None)]
        weight: Tensor | RowBlocks
        if kind == FORMATS["grouped"] and len(alike) == len(linears):
            rows = torch.cat([part.rows[part.order] for part in alike], dim=1)
            weight = RowBlocks(alike[0].kind, rows, torch.arange(len(rows)))
        else:
            weight = torch.cat([self._arranged(linear.weight, linear) for linear in linears], dim=1)
        return replace(self, weights=_OneWeight(weight)).pack([whole], kind, first_output=first_output)

    def _arranged(self, name: str, linear: LinearBlueprint) -> Tensor:
        rows = arranged(self._merged(name, linear), linear, head_dim=self.head_dim)
        return rows if linear.factor == 1.0 else (rows.float() * linear.factor).to(self.dtype)

    def _merged(self, name: str, linear: LinearBlueprint) -> Tensor:
        weight = self.weights.get(name)
        if linear.added is not None and name == linear.weight:
            first, second = (self.weights.get(each).float() for each in linear.added)
            weight = torch.addmm(weight.float(), second, first)
        if linear.after is not None:
            weight = self.weights.get(linear.after).float() @ weight.float()
        return weight.to(self.dtype) if linear.is_merged else weight

    def _bias(self, linears: Sequence[LinearBlueprint], outputs: Sequence[int], *, in_turns: bool) -> Tensor | None:
        """Return the biases of layers that are packed together, float32; None if there are none."""
        biases = [None if linear.bias is None else self._arranged(linear.bias, linear) for linear in linears]
        if in_turns and len(biases) == 1:
            biases = [None, None] if biases[0] is None else list(biases[0].chunk(2))
        if all(bias is None for bias in biases):
            return None
        full = [torch.zeros(count) for count in outputs]
        for part, bias in zip(full, biases, strict=True):
            if bias is not None:
                part[: len(bias)] = bias.to(self.dtype)
        if in_turns:
            return self.keep(torch.stack([part.reshape(-1, LANES) for part in full], dim=1).flatten().contiguous())
        return self.keep(torch.cat([*full, torch.zeros(-sum(map(len, full)) % LANES)]))

    def _grouped(
        self, linears: Sequence[LinearBlueprint], *, in_turns: bool, is_head: bool, first_output: int
    ) -> CLinear:
        groups = self.library.groups
        inputs = linears[0].inputs
        sources = [source for linear in linears for source in self._sources(linear)]
        if in_turns and len(sources) == 1:
            half = len(sources[0]) // 2
            sources = [_part(sources[0], 0, half), _part(sources[0], half, 2 * half)]
        blocks = [-(-len(source) // LANES) for source in sources]
        owners = [owner for owner, count in enumerate(blocks) for _ in range(count)]  # source of each block
        if in_turns:
            owners = [*range(len(blocks))] * blocks[0]
        kind = HEAD_KIND if is_head else LAYER_KIND  # of weights that are quantized here
        kinds = [source.kind if isinstance(source, RowBlocks) else kind for source in sources]
        sizes = [groups.block_bytes(inputs, kinds[owner]) for owner in owners]
        table = self.keep(table_of([kinds[owner] for owner in owners], sizes))
        packed = self.keep(self.room(sum(sizes)))
        lengths = list(map(len, sources))
        if len(sources) > 1 and not in_turns:
            lengths = [count * LANES for count in blocks]
        bias = self._bias(linears, lengths, in_turns=in_turns)

        def pack(piece: tuple[Tensor | RowBlocks, Tensor]) -> None:
            source, entries = piece
            if isinstance(source, Tensor):
                source = source.to(self.dtype).contiguous()
            groups.pack(source, inputs, packed, entries.contiguous())

        pieces = []
        for index, source in enumerate(sources):
            entries = table[torch.tensor(owners) == index]
            for first in range(0, len(source), PACK_ROWS):
                end = first + PACK_ROWS
                pieces.append((_part(source, first, end), entries[first // LANES : end // LANES]))
        list(self.pool.map(pack, pieces))
        fields = (address(bias), address(table), inputs, sum(lengths), FORMATS["grouped"], first_output)
        return CLinear(packed.data_ptr(), None, None, *fields)

    def _sources(self, linear: LinearBlueprint) -> Sequence[Tensor | RowBlocks]:
        """Return the weight of a layer; gate and up of an expert in blocks are two."""
        if linear.expert is None:
            whole = self.weights.blocks(linear.weight)
            blocks: Sequence[RowBlocks] | None = None if whole is None else [whole]
        else:
            blocks = self.weights.expert_blocks(linear.weight, linear.expert)
        if blocks is None or linear.factor != 1.0 or linear.is_merged:
            return [self._arranged(linear.weight, linear)]
        if linear.part is not None:
            return [replace(each, order=arranged(each.order, linear, head_dim=self.head_dim)) for each in blocks]
        if linear.is_transposed or linear.is_reordered:
            raise NativeUnavailableError(f"the rows of '{linear.weight}' have another order than passes need")
        return blocks


@final
class _OneWeight(Weights):
    """A weight that has no name."""

    def __init__(self, weight: Tensor | RowBlocks) -> None:
        self._weight = weight

    def get(self, name: str) -> Tensor:
        assert isinstance(self._weight, Tensor), "blocks are packed as they are"
        return self._weight

    def release(self, name: str) -> None:
        return

    def blocks(self, name: str) -> RowBlocks | None:
        return self._weight if isinstance(self._weight, RowBlocks) else None


def _filled_up(weight: Tensor) -> Tensor:
    """Return a weight with rows of zeros at its end, up to a whole number of blocks."""
    missing = -len(weight) % LANES
    return torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]) if missing else weight


def _part(source: Tensor | RowBlocks, first: int, end: int) -> Tensor | RowBlocks:
    return source.part(first, end) if isinstance(source, RowBlocks) else source[first:end]
