"""The largest entries of wide rows under noise, by whatever finds them fastest here.

A searcher divides by the temperature, adds noise and ranks in one walk over a row, with logarithms that it may round
in its own way. Where two scores lie so close that this could decide, they are computed again in double precision, so
that a pick is the same whichever code searched.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from draftree.core import transfer
from draftree.core.noise import gumbel_of_few

RowNoise = Sequence[tuple[tuple[int, int], float] | None]
"""For each row the keys of its noise and its temperature; None for a row that is taken as it is."""
NEAR = 1e-3
"""Scores this close to the largest are computed exactly; searchers are off by less than a tenth of it."""
FEW = 4
FLOAT_BYTES = 4


class RowsAt(NamedTuple):
    """Where float32 rows lie in the host's memory.

    Their maker knows. Asking torch takes longer than a search: a pass has driven its code out of the caches.
    """

    address: int
    rows: int
    stride: int
    """From row to row, in numbers."""
    width: int
    memory: Any = None
    """What holds them, an array of ctypes; None if they are a tensor's."""

    def row(self, index: int) -> RowsAt:
        """One of them."""
        return self._replace(address=self.address + FLOAT_BYTES * index * self.stride, rows=1)

    def narrowed(self, width: int) -> RowsAt:
        """Their first columns."""
        return self._replace(width=width)

    def tensor(self) -> Tensor:
        """The rows as a tensor, which keeps the memory; only where that is known."""
        if not self.rows:
            return torch.empty(0, self.width)
        start = self.address - ctypes.addressof(self.memory)
        numbers = torch.frombuffer(self.memory, dtype=torch.float32, count=self.rows * self.stride, offset=start)
        return numbers.view(self.rows, self.stride)[:, : self.width]


class Found(NamedTuple):
    """What a search found in each row."""

    tokens: list[list[int]]
    """Columns, that of the largest score first, of equals the first; a row that holds a NaN starts with its column."""
    scores: list[list[float]]
    totals: list[float]
    """Logarithm of the row's sum of exponentials, where it was asked for."""


class Searcher(Protocol):
    """Finds the largest entries of rows."""

    max_count: int

    def search(self, logits: RowsAt, noise: RowNoise, count: int, *, totals: bool) -> Found:
        """The `count` largest scores of each row.

        Args:
            logits: the rows.
            noise: what is added to them.
            count: at most `max_count` and the width.
            totals: whether the sums are wanted.
        """
        ...


_searchers: list[Searcher] = []


def search_with(searcher: Searcher) -> None:
    """Let this searcher serve all rows on the CPU from now on."""
    _searchers[:] = [searcher]


def rows_of(given: Tensor | None, at: RowsAt | None) -> Tensor:
    """The rows as a tensor: the one that there is, or else one that is made of where they lie."""
    if given is not None:
        return given
    assert at is not None, "rows are a tensor, or somewhere"
    return at.tensor()


def rows_at(logits: Tensor) -> RowsAt | None:
    """Where these logits lie; None if they are not rows that a searcher reads."""
    if not transfer.on_host(logits) or logits.dtype != torch.float32 or logits.stride(-1) != 1:
        return None
    return RowsAt(logits.data_ptr(), logits.shape[0], logits.stride(0), logits.shape[1])


def can_search(count: int) -> bool:
    """Whether there is a searcher, and it ranks so many."""
    return bool(_searchers) and 0 < count <= _searchers[0].max_count


def search(logits: RowsAt, noise: RowNoise, count: int) -> Found:
    """As `Searcher.search`, sums included; only where `can_search` says so."""
    return _searchers[0].search(logits, noise, count, totals=True)


def exact_picks(at: RowsAt, noise: RowNoise, logits: Callable[[], Tensor]) -> tuple[list[int], list[bool]]:
    """The largest entry of each row under its noise, decided in double precision where it is close.

    Args:
        at: where the rows lie.
        noise: what is added to them.
        logits: gives the rows, if some of it is close.

    Returns:
        The picks, and whether each row has a token to choose and no NaN.
    """
    has_noise = any(noise)
    count = min(FEW, at.width) if has_noise else 1
    found = _searchers[0].search(at, noise, count, totals=False)
    picks = [tokens[0] for tokens in found.tokens]
    for row, (entry, scores) in enumerate(zip(noise, found.scores, strict=True) if has_noise else ()):
        if entry is not None and count > 1 and scores[1] >= scores[0] - NEAR and scores[0] > -math.inf:
            picks[row] = _decided(logits()[row], at.row(row), *entry)
    return picks, [math.isfinite(scores[0]) for scores in found.scores]


def _decided(row: Tensor, at: RowsAt, keys: tuple[int, int], temperature: float) -> int:
    searcher = _searchers[0]
    found = searcher.search(at, [(keys, temperature)], min(searcher.max_count, at.width), totals=False)
    tokens, scores = found.tokens[0], found.scores[0]
    near = sorted(token for token, score in zip(tokens, scores, strict=True) if score >= scores[0] - NEAR)
    values = [value / temperature for value in row[near].tolist()]
    exact = [value + noise for value, noise in zip(values, gumbel_of_few(keys, near), strict=True)]
    return near[max(range(len(near)), key=exact.__getitem__)]
