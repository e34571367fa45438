"""Packing of products whose weights have a scale for each group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.models.native.blueprint import LinearBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.groups import HEAD_KIND, LAYER_KIND, GroupFunctions, RowBlocks, table_of
from draftree.models.native.library import FORMATS, LANES, address
from draftree.models.native.packing import PACK_ROWS, Packing, arranged, packed_bias
from draftree.models.native.structures import CLinear


@dataclass(frozen=True, slots=True)
class GroupedPacker:
    """Packs products of one decoder.

    Attributes:
        functions: of the C library.
        packing: the decoder's weights, and where the result goes.
    """

    functions: GroupFunctions
    packing: Packing

    def pack(
        self,
        linears: Sequence[LinearBlueprint],
        *,
        in_turns: bool = False,
        is_head: bool = False,
        first_output: int = 0,
    ) -> CLinear:
        """Pack layers one after the other or, if `in_turns`, in alternating blocks (gate and up).

        Args:
            linears: layers with the same inputs.
            in_turns: as above; one layer is divided into two halves.
            is_head: whether it is the output head or the embedding, which have more bits.
            first_output: first column of a share.
        """
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
    """Return the source of each block."""
    if in_turns:
        return [source for _ in range(blocks[0]) for source in range(len(blocks))]
    return [source for source, count in enumerate(blocks) for _ in range(count)]
