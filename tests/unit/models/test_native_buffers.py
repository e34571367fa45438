"""Memory for logits is used again, and never while it is read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import ALIGNMENT, KEPT, LogitBufferPool, RowsAt, library
from draftree.models.native.logits import NativeLogits


def logits_in(pool: LogitBufferPool, count: int, width: int) -> NativeLogits:
    try:
        functions = library()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    buffer = pool.take(count, width)
    return NativeLogits(functions, RowsAt(buffer.address, count, width, width), buffer.memory, 1)


def test_a_buffer_that_is_not_read_is_used_again() -> None:
    pool = LogitBufferPool()
    first = logits_in(pool, 2, 100)
    address = first.at.address
    assert address % ALIGNMENT == 0
    del first
    assert pool.take(1, 50).address == address


HOLDS: dict[str, Callable[[NativeLogits], Any]] = {
    "rows": lambda rows: rows,
    "a row": lambda rows: rows.rows(1, 2),
    "a tensor": lambda rows: rows.tensor(),
    "a part of a tensor": lambda rows: rows.tensor()[1:],
}


@pytest.mark.parametrize("what", HOLDS)
def test_a_buffer_that_is_read_is_left_alone(what: str) -> None:
    pool = LogitBufferPool()
    found = logits_in(pool, 2, 100)
    found.tensor().fill_(7.0)
    address, held = found.at.address, HOLDS[what](found)
    del found
    others = [logits_in(pool, 2, 100) for _ in range(2 * KEPT)]
    assert address not in [other.at.address for other in others]
    for other in others:
        other.tensor().fill_(1.0)
    assert (held if isinstance(held, torch.Tensor) else held.tensor()).unique().tolist() == [7.0]


def test_a_cleared_pool_keeps_no_memory_but_that_of_logits_in_use() -> None:
    pool = LogitBufferPool()
    held, unused = pool.take(2, 100).memory, weakref.ref(pool.take(3, 100).memory)
    held[0] = 7.0
    assert unused() is not None, "the next pass would use it"
    pool.clear()
    assert unused() is None
    assert held[0] == 7.0
    assert pool.take(2, 100).memory is not held
