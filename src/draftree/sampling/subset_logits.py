"""Logits of some tokens of a vocabulary: all others have -inf.

A head with a draft vocabulary computes few columns. Where only temperature and noise count, they are ranked without
rows of the whole vocabulary: the noise of a column is that of its token.
"""

from __future__ import annotations

import math
from typing import final

from torch import Tensor

from draftree.core.tensors import to_host
from draftree.sampling.logits import Logits, Picks, RowNoise, TensorLogits, Top, perturbed
from draftree.sampling.search import leading, log_total, read_pairs


@final
class TokenSubset:
    """Tokens that have a column.

    Args:
        ids: their token ids, ascending, shape (columns,), on the device of the logits.
        width: tokens of the whole vocabulary.
    """

    __slots__ = ("columns", "names", "token_ids", "width")

    def __init__(self, ids: Tensor, width: int) -> None:
        self.columns = ids.long()
        self.token_ids = ids.int()
        self.names: list[int] = to_host(self.columns)
        self.width = width


@final
class SubsetLogits(Logits):
    """Logits of the tokens of a subset.

    Args:
        tensor: shape (rows, columns), float32 or float64.
        subset: the tokens of the columns.
    """

    __slots__ = ("_subset", "_tensor")

    def __init__(self, tensor: Tensor, subset: TokenSubset) -> None:
        assert tensor.shape[1] == len(subset.names), "every column has a token"
        self._tensor = tensor
        self._subset = subset

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self._tensor.shape[0]

    @property
    def width(self) -> int:
        """Tokens of the whole vocabulary."""
        return self._subset.width

    def tensor(self) -> Tensor:
        """The rows of the whole vocabulary, a new tensor."""
        rows = self._tensor.new_full((self.num_rows, self.width), -math.inf)
        return rows.index_copy_(1, self._subset.columns, self._tensor)

    def columns(self) -> Tensor:
        """The columns of the subset."""
        return self._tensor

    def rows(self, start: int, stop: int) -> SubsetLogits:
        """Some rows; a view."""
        return SubsetLogits(self._tensor[start:stop], self._subset)

    def narrowed(self, width: int) -> TensorLogits:
        """The first tokens of the whole vocabulary."""
        return TensorLogits(self.tensor()[:, :width])

    def replaced(self, tensor: Tensor) -> TensorLogits:
        """Logits of the whole vocabulary with these values."""
        return TensorLogits(tensor)

    def picks(self, noise: RowNoise) -> Picks:
        """Picks from the rows of the whole vocabulary."""
        return TensorLogits(self.tensor()).picks(noise)

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        """The largest entries among the columns; at most as many as there are."""
        names = self._subset.names
        scores = perturbed(self._tensor, noise, overwrites=overwrites, token_ids=self._subset.token_ids)
        columns, values = read_pairs(*leading(scores, min(count, len(names))))
        return Top([[names[column] for column in row] for row in columns], values, to_host(log_total(scores)[:, 0]))
