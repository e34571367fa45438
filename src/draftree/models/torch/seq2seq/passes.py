"""Passes of a decoder over slots: self-attention in the slots' trees, cross-attention to each slot's source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftree.models.source import Source
from draftree.models.torch.attention import attend
from draftree.models.torch.dynamic import SlotPass
from draftree.models.torch.seq2seq.attention import layer_call
from draftree.models.torch.seq2seq.positions import BiasTables


@dataclass(slots=True, eq=False)
class EncodedSource:
    """Cross-attention keys and values of a source. Its count is changed by its model only.

    Attributes:
        source: the source.
        layers: keys and values of each layer, shape (1, heads, length, head_dim).
        length: number of positions.
        num_slots: number of slots that refer to it.
    """

    source: Source
    layers: Sequence[tuple[Tensor, Tensor]]
    length: int
    num_slots: int = 0


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
        sources: for each source its rows, None for all rows of the pass.
        tokens: token of each row, shape (rows,).
        positions: position of each row, shape (rows,).
        num_positions: largest position plus one.
        tables: biases by distance.
        keeps_weights: whether the weights of the last cross-attention are computed too.
    """

    layers: DecoderLayers
    inner: SlotPass
    sources: Sequence[tuple[EncodedSource, Tensor | None]]
    tokens: Tensor
    positions: Tensor
    num_positions: int
    tables: BiasTables
    keeps_weights: bool = False
    weights: list[Tensor] = field(default_factory=list, init=False)
    """Of the rows of each source, shape (rows, source length)."""
    bias: Tensor | None = field(default=None, init=False)

    def positions_of(self) -> tuple[Tensor, Tensor]:
        """Return tokens and positions of the rows."""
        return self.tokens, self.positions

    def bias_of(self, module: nn.Module) -> bool:
        """Use a module's bias in the following self-attentions."""
        self.bias = self.tables.of(module, self.num_positions)
        return True

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, given: dict[str, Any]
    ) -> Tensor:
        """Attend to the slots in self-attention modules, to the sources in cross-attention modules."""
        layer = self.layers.own.get(module)
        if layer is not None:
            bias = self.bias if given.get("position_bias") is not None else None
            return self.inner.attend(layer_call(layer, query, scaling, given, bias), query, key, value)
        layer = self.layers.cross[module]
        call = layer_call(layer, query, scaling, given, None)
        if self.keeps_weights and layer == len(self.layers.cross) - 1:
            self._keep_weights(query, layer, call.scaling)
        mixed: Tensor | None = None
        for source, rows in self.sources:
            keys, values = source.layers[layer]
            if rows is None:
                return attend(query, keys, values, call=call, mask=None).transpose(1, 2)
            part = attend(query[:, :, rows], keys, values, call=call, mask=None).transpose(1, 2)
            if mixed is None:
                mixed = part.new_zeros(1, query.shape[2], *part.shape[2:])
            mixed[:, rows] = part
        assert mixed is not None, "a pass has rows"
        return mixed

    def _keep_weights(self, query: Tensor, layer: int, scale: float) -> None:
        for source, rows in self.sources:
            keys, own = source.layers[layer][0].float(), query if rows is None else query[:, :, rows]
            keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
            scores = (own.float() * scale) @ keys.transpose(2, 3)
            self.weights.append(scores.softmax(dim=-1).mean(dim=1)[0])

    def weights_of(self, order: Sequence[int], counts: Sequence[int]) -> list[np.ndarray]:
        """Return the weights of the jobs.

        Args:
            order: number of each job, in the order of the rows.
            counts: number of rows of each job, in the same order.

        Returns:
            For each job its rows, shape (rows, source length), float32.
        """
        places = list(range(len(self.tokens)))
        row_of = {}
        for number, (_, rows) in enumerate(self.sources):
            for index, row in enumerate(places if rows is None else rows.tolist()):
                row_of[row] = (number, index)
        weights = [own.cpu().numpy() for own in self.weights]
        found: dict[int, np.ndarray] = {}
        first = 0
        for job, count in zip(order, counts, strict=True):
            at = [row_of[row] for row in range(first, first + count)]
            found[job] = weights[at[0][0]][[index for _, index in at]]
            first += count
        return [found[job] for job in sorted(found)]


def rows_by_source(
    sources: Sequence[EncodedSource], counts: Sequence[int], device: torch.device
) -> list[tuple[EncodedSource, Tensor | None]]:
    """Return each source with its rows; None if all rows have one source.

    Args:
        sources: source of each job, in the order of the rows.
        counts: number of rows of each job.
        device: device of the row numbers.
    """
    if all(source is sources[0] for source in sources):
        return [(sources[0], None)]
    found: dict[int, tuple[EncodedSource, list[int]]] = {}
    first = 0
    for source, count in zip(sources, counts, strict=True):
        found.setdefault(id(source), (source, []))[1].extend(range(first, first + count))
        first += count
    return [(source, torch.tensor(rows, device=device)) for source, rows in found.values()]
