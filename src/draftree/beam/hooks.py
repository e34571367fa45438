"""Functions from outside that a search calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from draftree.beam.strategies.base import Candidate

if TYPE_CHECKING:
    from draftree.beam.state import TextSearch

Decode = Callable[[Sequence[int]], str]
"""Function from generated token ids to text."""
OnStep = Callable[["TextSearch"], None]
"""Function that is called with a search after each of its steps."""


class Hooks(ABC):
    """Rules from outside of the parameters."""

    @abstractmethod
    def process(self, text: TextSearch, logprobs: Tensor) -> Tensor:
        """Return changed log-probabilities of a text's live beams, shape (beams, vocab)."""

    @abstractmethod
    def ends(self, text: TextSearch, candidates: Sequence[Candidate]) -> Sequence[bool]:
        """Return whether each candidate ends, besides those with an end token."""
