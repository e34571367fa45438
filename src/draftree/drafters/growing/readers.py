"""In which tokens a stepped model reads texts and trees, and answers; here for a model of the target's vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from draftree.drafters.base import SequenceView
from draftree.sampling.logits import Logits


class Reading(ABC):
    """One text in the tokens that a model reads."""

    @abstractmethod
    def advance(self) -> int:
        """Take in what was written since; returns how many of the tokens before still stand."""

    @abstractmethod
    def __len__(self) -> int:
        """Tokens, as of the last `advance`."""

    @abstractmethod
    def tokens(self, start: int, stop: int | None = None) -> list[int]:
        """Some of the tokens, as a slice of them."""


class Reader(ABC):
    """In which tokens a model reads texts and trees, and in which its answers are wanted."""

    @abstractmethod
    def open(self, view: SequenceView) -> Reading:
        """The reading of a new sequence."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> list[int]:
        """A tree's tokens, one to one, as the model reads them."""

    @abstractmethod
    def answer(self, logits: Logits) -> Logits:
        """The model's logits over the vocabulary that trees are in; those that were given are lost."""


@final
class SameReader(Reader):
    """Trees and texts in the model's own vocabulary; logits may be wider or narrower.

    Models of one vocabulary differ in the width of their logits: many round it up. A token that the model has no row
    for is read as token 0: a guess may be wrong.

    Args:
        known: tokens that the model can read.
        wanted: width of the logits that are wanted.
    """

    def __init__(self, known: int, wanted: int) -> None:
        self._known = known
        self._wanted = wanted

    def open(self, view: SequenceView) -> Reading:
        """The history itself."""
        return _History(view, self._known)

    def read(self, tokens: Sequence[int]) -> list[int]:
        """As they are."""
        return list(tokens)

    def answer(self, logits: Logits) -> Logits:
        """Rows cut or filled."""
        missing = self._wanted - logits.width
        if missing <= 0:
            return logits.narrowed(self._wanted)
        with logits.computing():
            return logits.replaced(torch.nn.functional.pad(logits.tensor(), (0, missing), value=float("-inf")))


class _History(Reading):
    def __init__(self, view: SequenceView, known: int) -> None:
        self._history = view.history
        self._known = known
        self._length = 0

    def advance(self) -> int:
        before, self._length = self._length, len(self._history)
        return before

    def __len__(self) -> int:
        return self._length

    def tokens(self, start: int, stop: int | None = None) -> list[int]:
        tokens = self._history.tokens[: self._length][start:stop]
        known: list[int] = np.where(tokens < self._known, tokens, 0).tolist()
        return known
