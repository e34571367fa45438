"""Logits of some tokens of a vocabulary from a pass in C, ranked in C with the noise of their token ids."""

from __future__ import annotations

from array import array
from contextlib import AbstractContextManager
from typing import final

from torch import Tensor

from draftree.models.native.logits import NativeLogits
from draftree.sampling.logits import Logits, Picks, RowNoise, SubsetLogits, TensorLogits, TokenSubset, Top

SEARCHED = 64
"""The C library reads token ids of columns in groups of this size."""


@final
class NativeSubset:
    """Tokens that have a column, in the format of the C library.

    Args:
        tokens: the tokens.
    """

    __slots__ = ("address", "ids", "tokens")

    def __init__(self, tokens: TokenSubset) -> None:
        self.tokens = tokens
        self.ids = array("i", [*tokens.names, *[0] * (-len(tokens.names) % SEARCHED)])
        self.address = self.ids.buffer_info()[0]


@final
class NativeSubsetLogits(Logits):
    """Logits of the tokens of a subset; all others have -inf.

    Args:
        columns: logits of the subset.
        subset: the tokens of the columns.
    """

    __slots__ = ("_columns", "_subset")

    def __init__(self, columns: NativeLogits, subset: NativeSubset) -> None:
        assert columns.width == len(subset.tokens.names), "every column has a token"
        self._columns = columns
        self._subset = subset

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._columns.num_rows

    @property
    def width(self) -> int:
        """Number of tokens of the whole vocabulary."""
        return self._subset.tokens.width

    def tensor(self) -> Tensor:
        """Return the rows of the whole vocabulary, a new tensor."""
        return self._by_torch().tensor()

    def columns(self) -> Tensor:
        """Return the columns of the subset, which share the memory of the pass."""
        return self._columns.tensor()

    def rows(self, start: int, stop: int) -> NativeSubsetLogits:
        """Return some rows as a view."""
        return NativeSubsetLogits(self._columns.rows(start, stop), self._subset)

    def narrowed(self, width: int) -> TensorLogits:
        """Return the first tokens of the whole vocabulary."""
        return self._by_torch().narrowed(width)

    def replaced(self, tensor: Tensor) -> Logits:
        """Return logits of the whole vocabulary with these values."""
        return self._columns.replaced(tensor)

    def picks(self, noise: RowNoise) -> Picks:
        """Return picks from the rows of the whole vocabulary."""
        return self._columns.replaced(self.tensor()).picks(noise)

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        """Return the largest entries among the columns, at most as many as there are, searched in C if it can."""
        columns, names = self._columns, self._subset.tokens.names
        count = min(count, len(names))
        library = columns.library
        if count > library.max_count:
            with columns.computing():
                return self._by_torch().top(noise, count, overwrites=overwrites)
        found = library.search(
            columns.at, noise, count, totals=True, num_threads=columns.num_threads, ids=self._subset.address
        )
        return found._replace(tokens=[[names[column] for column in row] for row in found.tokens])

    def computing(self) -> AbstractContextManager[object]:
        """Limit torch to one thread, as for the columns."""
        return self._columns.computing()

    def _by_torch(self) -> SubsetLogits:
        return SubsetLogits(self._columns.tensor(), self._subset.tokens)
