"""Tables of score biases by distance in the layout of the C library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftree.models.native.structures import CPass

PADDING = 64
"""Entries after each head's table, which are read and masked."""
FIRST_DISTANCES = 256


class ScoreBiases:
    """Tables that grow with the texts.

    Args:
        tables: biases by distance, shape (heads, distances); farther ones are those of the last distance.
        used: table of each layer; None for none.
    """

    def __init__(self, tables: Sequence[Tensor], used: Sequence[int | None]) -> None:
        self._tables, self._used = tables, used
        self._length = 0
        self._kept: list[Tensor] = []

    def point(self, run: CPass, layers: Any, *, longest: int) -> None:
        """Set the tables of a pass whose positions are below `longest`."""
        if not self._tables or longest <= self._length:
            return
        self._length = max(2 * self._length, longest, FIRST_DISTANCES)
        distances = torch.arange(self._length - 1, -1, -1)
        self._kept = [
            torch.nn.functional.pad(table[:, distances.clamp(max=table.shape[1] - 1)], (0, PADDING)).contiguous()
            for table in self._tables
        ]
        for layer, used in zip(layers, self._used, strict=True):
            if used is not None:
                layer.score_bias = self._kept[used].data_ptr()
        run.bias_length = self._length
