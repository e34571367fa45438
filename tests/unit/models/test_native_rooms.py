"""Logit buffers are reused, but never while a reader holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftree.models.native.logit_buffers import ALIGNMENT, KEPT, LogitBufferPool
from draftree.sampling.searcher import RowsAt


def test_an_unused_buffer_is_reused() -> None:
    rooms = LogitBufferPool()
    first = rooms.rows(2, 100)
    address = first.address
    assert address % ALIGNMENT == 0
    del first
    assert rooms.rows(1, 50).address == address


HOLDS: dict[str, Callable[[RowsAt], Any]] = {
    "rows": lambda rows: rows,
    "a row": lambda rows: rows.row(1),
    "a tensor": lambda rows: rows.tensor(),
    "a part of a tensor": lambda rows: rows.tensor()[1:],
}


@pytest.mark.parametrize("what", HOLDS)
def test_a_buffer_in_use_is_left_alone(what: str) -> None:
    rooms = LogitBufferPool()
    found = rooms.rows(2, 100)
    found.tensor().fill_(7.0)
    address, held = found.address, HOLDS[what](found)
    del found
    others = [rooms.rows(2, 100) for _ in range(2 * KEPT)]
    assert address not in [other.address for other in others]
    for other in others:
        other.tensor().fill_(1.0)
    assert (held if isinstance(held, torch.Tensor) else held.tensor()).unique().tolist() == [7.0]


def test_rows_become_a_tensor_of_their_own_width() -> None:
    found = LogitBufferPool().rows(3, 10)
    found.tensor().copy_(torch.arange(30.0).view(3, 10))
    assert found.narrowed(4).tensor().tolist() == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    assert found.row(2).narrowed(2).tensor().tolist() == [[20, 21]]
    assert LogitBufferPool().rows(0, 10).tensor().shape == (0, 10)
