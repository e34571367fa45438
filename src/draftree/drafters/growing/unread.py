"""Rows of a text that a head has not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        first, end = max(first, self.first), min(end, self.end)
        if first >= end:
            return None
        return Unread(first, self.hidden[first - self.first : end - self.first])


def last_rows(pieces: Sequence[Unread], count: int) -> list[Unread]:
    """Return the last `count` rows of ascending pieces."""
    if not pieces:
        return []
    end = pieces[-1].end
    found = (piece.between(end - count, end) for piece in pieces)
    return [piece for piece in found if piece is not None]


def common_length(one: History, other: History) -> int:
    """Return the length of the common prefix of two texts."""
    length = min(len(one), len(other))
    differs = one.tokens[:length] != other.tokens[:length]
    return int(differs.argmax()) if differs.any() else length
