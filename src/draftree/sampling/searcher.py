"""The largest entries of wide rows under noise, by whatever finds them fastest here.

A searcher adds noise and ranks in one walk over a row, with logarithms that it may round in its own way. Where two
scores lie so close that this could decide, their noise is computed again in double precision, so that a pick is the
same whoever searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftree.core.noise import gumbel_of_few
from draftree.sampling.search import argmax

NoiseKeys = Sequence[tuple[int, int] | None]
"""For each row the keys of its noise; None for a row without."""
NEAR = 1e-3
"""Scores this close to the largest are computed exactly; searchers are off by less than a tenth of it."""
FEW = 4


class Searcher(Protocol):
    """Finds the largest entries of rows."""

    max_count: int

    def search(self, logits: Tensor, keys: NoiseKeys, count: int, *, totals: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Columns and scores of the `count` largest of each row, and the logarithm of its sum of exponentials.

        Args:
            logits: float32 on the CPU, shape (rows, vocab), rows contiguous.
            keys: the rows' noise.
            count: at most `max_count` and vocab.
            totals: whether the sums are wanted; else they are meaningless.

        Returns:
            Shapes (rows, count), (rows, count) and (rows). Of equals the first comes first; a NaN comes before all.
        """
        ...


_searchers: list[Searcher] = []


def search_with(searcher: Searcher) -> None:
    """Let this searcher serve all rows on the CPU from now on."""
    _searchers[:] = [searcher]


def can_search(logits: Tensor, count: int = 1) -> bool:
    """Whether there is a searcher, and these rows are for it."""
    if not _searchers or logits.device.type != "cpu" or logits.dtype != torch.float32:
        return False
    return logits.stride(-1) == 1 and 0 < count <= min(_searchers[0].max_count, logits.shape[-1])


def search(logits: Tensor, keys: NoiseKeys, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `Searcher.search`, sums included; only where `can_search` says so."""
    return _searchers[0].search(logits, keys, count, totals=True)


def exact_picks(logits: Tensor, keys: NoiseKeys) -> list[int]:
    """The largest entry of each row under its noise, decided in double precision where it is close."""
    if all(key is None for key in keys):
        return argmax(logits)
    tokens, scores, _ = _searchers[0].search(logits, keys, min(FEW, logits.shape[-1]), totals=False)
    found: list[int] = tokens[:, 0].tolist()
    if logits.shape[-1] == 1:
        return found
    close = (scores[:, 1] >= scores[:, 0] - NEAR).tolist()
    for row, is_close in enumerate(close):
        key = keys[row]
        if is_close and key is not None:
            found[row] = _decided(logits[row], key)
    return found


def _decided(row: Tensor, key: tuple[int, int]) -> int:
    searcher = _searchers[0]
    tokens, scores, _ = searcher.search(row[None], [key], min(searcher.max_count, len(row)), totals=False)
    near: list[int] = sorted(tokens[0][scores[0] >= scores[0, 0] - NEAR].tolist())
    exact = [value + noise for value, noise in zip(row[near].tolist(), gumbel_of_few(key, near), strict=True)]
    return near[max(range(len(near)), key=exact.__getitem__)] if near else int(tokens[0, 0])
