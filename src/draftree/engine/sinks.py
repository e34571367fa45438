"""Receiver of the hidden states of every token that the target reads, such as training data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftree.engine.sequence import WritingSequence


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a pass that belong to successive tokens of one text.

    Attributes:
        sequence: the text; it may have ended with this pass.
        start: index of the first token in the text, prompt included.
        rows: rows of the pass, one per token.
    """

    sequence: WritingSequence
    start: int
    rows: Sequence[int]


class StateSink(ABC):
    """Receives hidden states with every pass of the target.

    A text of n tokens has states of its first n - 1 tokens: the target never reads the last one. Texts that fail
    have none from then on. A preempted text is read again from its first token.
    """

    layers: tuple[int, ...]
    """Layers whose input is captured, counted from 0; the number of layers selects the output of the last one."""

    @abstractmethod
    def take(self, hidden: Tensor, texts: Sequence[StateRows]) -> None:
        """Receive the states of one pass.

        Args:
            hidden: states of all rows, shape (rows, layers, hidden) with the layers in the order of `layers`; valid
                during the call only.
            texts: rows of each text.
        """
