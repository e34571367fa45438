"""Rows of a text that a head has not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.sampling.history import History

MAX_UNREAD = 512
"""Maximum number of unread rows of a sequence that are kept while no trees are requested."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Consecutive rows that were not read yet.

    Attributes:
        first: position of the first one.
        hidden: the target's hidden states before each, shape (rows, layers, hidden), or the states made from them,
            shape (rows, hidden).
    """

    first: int
    hidden: Tensor

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.first + len(self.hidden)

    def between(self, first: int, end: int) -> Unread | None:
        """Return the rows of these positions; None for no row."""
        if first <= self.first and end >= self.end and len(self.hidden):
            return self
        first, end = max(first, self.first), min(end, self.end)
        if first >= end:
            return None
        return Unread(first, self.hidden[first - self.first : end - self.first])


@dataclass(frozen=True, slots=True)
class Rows:
    """Unread rows that one pass can read.

    Attributes:
        positions: ascending.
        hidden: what is before them, as in `Unread`.
    """

    positions: list[int]
    hidden: Tensor

    @property
    def is_projected(self) -> bool:
        """Whether the states before the rows are made from hidden states of the target."""
        return self.hidden.dim() == 3


def first_rows(pieces: Sequence[Unread], end: int) -> Rows | None:
    """Return the first rows of one kind below a position, from as many pieces as possible; None for no row."""
    positions: list[int] = []
    parts: list[Tensor] = []
    for piece in pieces:
        part = piece.between(piece.first, end)
        if part is None or (parts and part.hidden.dim() != parts[0].dim()):
            break
        positions += range(part.first, part.end)
        parts.append(part.hidden)
    if not parts:
        return None
    return Rows(positions, parts[0] if len(parts) == 1 else torch.cat(parts))


def drop_before(pieces: list[Unread], position: int) -> None:
    """Drop the rows before a position from ascending pieces, in place."""
    while pieces and pieces[0].first < position:
        rest = pieces[0].between(position, pieces[0].end)
        if rest is not None:
            pieces[0] = rest
            return
        del pieces[0]


def common_length(one: History, other: History) -> int:
    """Return the length of the common prefix of two texts."""
    length = min(len(one), len(other))
    differs = one.tokens[:length] != other.tokens[:length]
    return int(differs.argmax()) if differs.any() else length
