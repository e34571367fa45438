"""Passes of a decoder over slots: self-attention in the slots' trees, cross-attention to each slot's source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from draftree.models.torch.attention import LayerCall
from draftree.models.torch.dynamic import SlotPass
from draftree.models.torch.seq2seq.attention import layer_call
from draftree.models.torch.seq2seq.cross import CrossPass, EncodedSource
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
        weighed: source and number of rows of each job, if the weights of the last cross-attention are computed too.
    """

    layers: DecoderLayers
    inner: SlotPass
    cross: CrossPass
    tokens: Tensor
    positions: Tensor
    num_positions: int
    tables: BiasTables
    weighed: Sequence[tuple[EncodedSource, int]] | None = None
    weights: list[Tensor] = field(default_factory=list, init=False)
    """Of the rows of each job, shape (rows, source length): the mean of all heads."""
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
        return self.attend_source(layer_call(layer, query, scaling, given, None), query)

    def attend_source(self, call: LayerCall, query: Tensor) -> Tensor:
        """Attend to the sources with queries of shape (1, heads, rows, head_dim)."""
        if self.weighed is not None and call.layer == len(self.layers.cross) - 1:
            self._keep_weights(self.weighed, call, query)
        return self.cross.attend(call.layer, call, query)

    def _keep_weights(self, weighed: Sequence[tuple[EncodedSource, int]], call: LayerCall, query: Tensor) -> None:
        first = 0
        for source, count in weighed:
            keys, own = source.layers[call.layer][0].float(), query[:, :, first : first + count].float()
            keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
            scores = (own * call.scaling) @ keys.transpose(2, 3)
            self.weights.append(scores.softmax(dim=-1).mean(dim=1)[0])
            first += count

    def weights_of(self, order: Sequence[int]) -> list[np.ndarray]:
        """Return the weights of the jobs, each of shape (rows, source length), float32.

        Args:
            order: number of each job, in the order of the rows.
        """
        found = dict(zip(order, self.weights, strict=True))
        return [found[job].cpu().numpy() for job in sorted(found)]
