"""Packed weights with a scale for each group of inputs (layout: `models/native/csrc/groups.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftree.models.native.blueprint import Blueprint, LinearBlueprint
from draftree.models.native.structures import CLinear
from draftree.weights.block_kinds import KINDS

__all__ = [
    "HEAD_KIND",
    "KINDS",
    "LAYER_KIND",
    "GroupFunctions",
    "RowBlocks",
    "kinds_of_plan",
    "lookup_of",
    "table_of",
]

LAYER_KIND, HEAD_KIND = "Q4_K", "Q6_K"
"""Kinds of 4-bit weights that are quantized here: products of layers; the output head and the embedding."""
KIND_BITS = 4
"""Bits of the kind in an entry of a table of blocks; the other bits are the place of the block."""
_size, _pointer = ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """A weight in the blocks of a GGUF file.

    Attributes:
        kind: name of the blocks, one of `KINDS`.
        rows: bytes of the rows, shape (rows, bytes of a row), uint8, contiguous.
        order: row of each output, int64.
    """

    kind: str
    rows: Tensor
    order: Tensor

    def __len__(self) -> int:
        return len(self.order)

    def part(self, first: int, end: int) -> RowBlocks:
        """Return the outputs from `first` to `end`, exclusive."""
        return replace(self, order=self.order[first:end])


class GroupFunctions:
    """Functions of the C library for weights with groups.

    Args:
        library: the loaded library.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        library.draftree_group_bytes.argtypes = [_size, _size]
        library.draftree_group_bytes.restype = _size
        library.draftree_quantize.argtypes = [_pointer, _size, _size, _size, _pointer, _pointer]
        library.draftree_quantize.restype = None
        library.draftree_pack_blocks.argtypes = [_pointer, _size, _pointer, _size, _size, _pointer, _pointer]
        library.draftree_pack_blocks.restype = None
        library.draftree_unpack_groups.argtypes = [ctypes.POINTER(CLinear), _size, _size, _pointer]
        library.draftree_unpack_groups.restype = None

    def block_bytes(self, inputs: int, kind: str) -> int:
        """Return the size of 16 packed outputs in bytes."""
        return int(self._library.draftree_group_bytes(inputs, KINDS.index(kind)))

    def pack(self, source: Tensor | RowBlocks, inputs: int, packed: Tensor, blocks: Tensor) -> None:
        """Pack outputs into blocks of `packed`: quantize a float32 or bfloat16 weight, or copy codes and scales.

        Args:
            source: weight of shape (outputs, inputs), contiguous; or blocks of a GGUF file.
            inputs: number of inputs.
            packed: bytes of the whole product.
            blocks: entry of each block of these outputs in the product's table, int64, contiguous.
        """
        if isinstance(source, RowBlocks):
            order = source.order.contiguous()
            self._library.draftree_pack_blocks(
                source.rows.data_ptr(),
                source.rows.shape[1],
                order.data_ptr(),
                len(order),
                inputs,
                packed.data_ptr(),
                blocks.data_ptr(),
            )
            return
        kind = 1 if source.dtype == torch.bfloat16 else 0
        self._library.draftree_quantize(
            source.data_ptr(), kind, source.shape[0], inputs, packed.data_ptr(), blocks.data_ptr()
        )

    def unpack(self, linear: CLinear, outputs: int) -> Tensor:
        """Return the first outputs of a product as the pass uses them, shape (outputs, inputs), float32."""
        found = torch.empty(outputs, linear.inputs)
        self._library.draftree_unpack_groups(ctypes.byref(linear), 0, outputs, found.data_ptr())
        return found


def kinds_of_plan(plan: Blueprint, found: dict[str, str]) -> list[tuple[LinearBlueprint, str]]:
    """Return every product of a decoder and its embedding, if it is not the head, with the kind of its blocks.

    Routers are not among them: they are never quantized.

    Args:
        plan: architecture of the decoder.
        found: kinds of weights whose blocks are given, by name; other weights are quantized.
    """
    parts = [(part, LAYER_KIND) for layer in plan.layers for part in layer.products]
    parts.append((plan.head, HEAD_KIND))
    if not plan.is_tied:
        parts.append((lookup_of(plan), HEAD_KIND))
    return [(part, found.get(part.weight, kind)) for part, kind in parts]


def lookup_of(plan: Blueprint) -> LinearBlueprint:
    """Return the embedding as a product."""
    return LinearBlueprint(plan.embedding, None, plan.hidden, max(plan.vocab, plan.head.outputs))


def table_of(kinds: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """Return the table of a product's blocks, int64.

    Args:
        kinds: kind of each block.
        sizes: size of each block in bytes.
    """
    starts = torch.tensor([0, *sizes[:-1]], dtype=torch.int64).cumsum(0)
    return (starts << KIND_BITS) + torch.tensor([KINDS.index(kind) for kind in kinds], dtype=torch.int64)
