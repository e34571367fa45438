"""Readers: conversion of texts, trees and logits between the vocabularies of target and draft model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from draftree.drafters.base import SequenceView
from draftree.sampling.logits import Logits


class Reading(ABC):
    """Text in the tokens of a model."""

    @abstractmethod
    def advance(self) -> int:
        """Process newly written tokens; return how many earlier tokens are unchanged."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens since the last `advance`."""

    @abstractmethod
    def tokens(self, start: int, stop: int | None = None) -> list[int]:
        """Return a slice of the tokens."""


class Reader(ABC):
    """Conversion of texts and trees to a model's tokens, and of its logits to the trees' vocabulary."""

    @abstractmethod
    def open(self, view: SequenceView) -> Reading:
        """Return the `Reading` of a new sequence."""

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> list[int]:
        """Convert tokens of a tree to the model's tokens, one to one."""

    @abstractmethod
    def answer(self, logits: Logits) -> Logits:
        """Convert the model's logits to the vocabulary of trees; the argument is consumed."""


@final
class SameReader(Reader):
    """Reader for a model with the target's vocabulary; logits may be wider or narrower.

    Models with the same vocabulary may pad logits to different widths. A token without an embedding is read as token 0,
    so a draft may be wrong.

    Args:
        known: number of tokens that the model can read.
        wanted: width of the returned logits.
        reads_source: whether the source of an encoder-decoder target is read before the text, by a causal model.
    """

    def __init__(self, known: int, wanted: int, *, reads_source: bool = False) -> None:
        self._known = known
        self._wanted = wanted
        self._reads_source = reads_source

    def open(self, view: SequenceView) -> Reading:
        """Return the history, after the source if it is read."""
        return _History(view, self._known, view.source if self._reads_source else ())

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens unchanged, except unknown ones."""
        return list(tokens)

    def answer(self, logits: Logits) -> Logits:
        """Return rows cut or padded to the width."""
        missing = self._wanted - logits.width
        if missing <= 0:
            return logits.narrowed(self._wanted)
        with logits.computing():
            return logits.replaced(torch.nn.functional.pad(logits.tensor(), (0, missing), value=float("-inf")))


class _History(Reading):
    def __init__(self, view: SequenceView, known: int, source: Sequence[int]) -> None:
        self._history = view.history
        self._known = known
        self._source = np.array(source, dtype=np.int64)
        self._length = 0

    def advance(self) -> int:
        before, self._length = self._length, len(self._source) + len(self._history)
        return before

    def __len__(self) -> int:
        return self._length

    def tokens(self, start: int, stop: int | None = None) -> list[int]:
        tokens = self._history.tokens
        if len(self._source):
            tokens = np.concatenate([self._source, tokens])
        tokens = tokens[: self._length][start:stop]
        known: list[int] = np.where(tokens < self._known, tokens, 0).tolist()
        return known
