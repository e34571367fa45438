"""Passes of a decoder over slots: self-attention in the slots' trees, cross-attention to each slot's source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from draftree.models.torch.dynamic import SlotPass
from draftree.models.torch.seq2seq.attention import layer_call
from draftree.models.torch.seq2seq.cross import CrossPass
from draftree.models.torch.seq2seq.positions import BiasTables


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """The attention modules of a decoder, with the index of their layer."""

    own: dict[nn.Module, int]
    cross: dict[nn.Module, int]


@dataclass(slots=True, eq=False)
class DecoderPass:
    """Handler of the attention calls of one pass.

    Attributes:
        layers: the decoder's attention modules.
        inner: the pass over the slots.
        cross: the attention to the sources.
        tokens: token of each row, shape (rows,).
        positions: position of each row, shape (rows,).
        num_positions: largest position plus one.
        tables: biases by distance.
    """

    layers: DecoderLayers
    inner: SlotPass
    cross: CrossPass
    tokens: Tensor
    positions: Tensor
    num_positions: int
    tables: BiasTables
    bias: Tensor | None = field(default=None, init=False)

    def positions_of(self) -> tuple[Tensor, Tensor]:
        """Return tokens and positions of the rows."""
        return self.tokens, self.positions

    def bias_of(self, module: nn.Module) -> bool:
        """Use a module's bias in the following self-attentions."""
        self.bias = self.table_of(module)
        return True

    def table_of(self, module: nn.Module) -> Tensor:
        """Return the bias of a module by distance, shape (heads, distances)."""
        return self.tables.of(module, self.num_positions)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, given: dict[str, Any]
    ) -> Tensor:
        """Attend to the slots in self-attention modules, to the sources in cross-attention modules."""
        layer = self.layers.own.get(module)
        if layer is not None:
            bias = self.bias if given.get("position_bias") is not None else None
            return self.inner.attend(layer_call(layer, query, scaling, given, bias), query, key, value)
        layer = self.layers.cross[module]
        return self.cross.attend(layer, layer_call(layer, query, scaling, given, None), query)
