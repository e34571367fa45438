"""Selection of rows and layers of captured hidden states.

A selection that is contiguous is a view: a small copy costs more than the arithmetic that follows it, and on several
threads it slows down the next pass in C.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftree.core.threads import single_threaded


def layers_of(hidden: Tensor, columns: Sequence[int]) -> Tensor:
    """Return some layers, shape (rows, columns, hidden).

    Args:
        hidden: shape (rows, layers, hidden).
        columns: indices of the layers, in any order.
    """
    if list(columns) == list(range(hidden.shape[1])):
        return hidden
    with single_threaded():
        return hidden[:, list(columns)]


def rows_of(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows, shape (rows, layers, hidden).

    Args:
        hidden: shape (rows, layers, hidden).
        rows: indices of the rows, in any order.
    """
    first = rows[0] if rows else 0
    if list(rows) == list(range(first, first + len(rows))):
        return hidden[first : first + len(rows)]
    with single_threaded():
        return hidden[list(rows)]
