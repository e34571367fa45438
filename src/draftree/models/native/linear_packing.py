"""Packing of products whose weights are float32, bfloat16 or int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from draftree.models.native.blueprint import LinearBlueprint
from draftree.models.native.library import FORMATS, LANES, Library, address
from draftree.models.native.packing import Packing, packed_bias, parts_of, pieces_of
from draftree.models.native.structures import CLinear


@dataclass(frozen=True, slots=True)
class LinearPacker:
    """Packs products of one decoder.

    Attributes:
        library: packs weights.
        packing: the decoder's weights, and where the result goes.
    """

    library: Library
    packing: Packing

    def pack(
        self,
        linears: Sequence[LinearBlueprint],
        kind: int,
        *,
        in_turns: bool = False,
        is_one: bool = False,
        first_output: int = 0,
    ) -> CLinear:
        """Pack layers one after the other or, if `in_turns`, in alternating blocks (gate and up).

        Args:
            linears: layers with the same inputs.
            kind: format of the packed weights.
            in_turns: as above; one layer is divided into two halves.
            is_one: their outputs are those of one layer, and their number is rounded up to a multiple of 16.
            first_output: first column of a share.
        """
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
