"""Collection of the hidden states of texts while they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from draftree.core.host import single_threaded
from draftree.engine.sequence import WritingSequence
from draftree.engine.sinks import StateRows, StateSink


@dataclass(slots=True)
class _States:
    pieces: list[Tensor] = field(default_factory=list)
    length: int = 0


@final
class StateCollector(StateSink):
    """Collects states of running texts in the dtype of the target, in host memory.

    Args:
        layers: captured layers.
        dtype: dtype of the collected states.
    """

    def __init__(self, layers: tuple[int, ...], dtype: torch.dtype) -> None:
        self.layers = layers
        self._dtype = dtype
        self._texts: dict[WritingSequence, _States] = {}

    def take(self, hidden: Tensor, texts: Sequence[StateRows]) -> None:
        """Convert the states of a pass at once, and keep views of them by text.

        Args:
            hidden: shape (rows, layers, hidden).
            texts: rows of each sequence in `hidden`.
        """
        with single_threaded():  # workers that spin after a copy would slow down the next pass
            states = hidden.to("cpu", self._dtype, copy=True)
        for text in texts:
            own = self._texts.setdefault(text.sequence, _States())
            if text.start < own.length:  # read again
                own.pieces = [torch.cat(own.pieces)[: text.start]]
            else:
                assert text.start == own.length, "every token is read"
            rows = text.rows
            is_run = not rows or rows[-1] - rows[0] + 1 == len(rows)
            own.pieces.append(states[rows[0] : rows[-1] + 1] if is_run and rows else states[list(rows)])
            own.length = text.start + len(rows)

    def pop(self, sequence: WritingSequence) -> Tensor:
        """Return the states of a finished text, shape (tokens - 1, layers, hidden), and forget them."""
        own = self._texts.pop(sequence)
        assert own.length == len(sequence.history) - 1, "every token but the last was read"
        with single_threaded():
            return torch.cat(own.pieces)

    def drop(self, sequence: WritingSequence) -> None:
        """Forget the states of a text that failed."""
        self._texts.pop(sequence, None)

    def clear(self) -> None:
        """Forget all texts."""
        self._texts.clear()
