"""Pool of memory for logits.

The logits of a pass take hundreds of kilobytes, and allocating them costs more than searching them, because the system
zeroes every page. So the next pass overwrites a buffer that is not referenced any more.
"""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

FLOAT_BYTES = 4
ALIGNMENT = 64
KEPT = 3
"""Maximum number of buffers: one for the last pass, others for passes whose logits are still in use."""
UNREAD = 3
"""References to an unused buffer: by the list, the loop and the call of `getrefcount`."""


class RowsAt(NamedTuple):
    """Location of float32 rows in host memory."""

    address: int
    rows: int
    stride: int
    """Distance between rows, in numbers."""
    width: int


class LogitBuffer(NamedTuple):
    """Buffer for rows of floats."""

    memory: ctypes.Array[ctypes.c_float]
    address: int
    """Address of the first row."""


class LogitBufferPool:
    """Pool of buffers for rows of floats. A buffer is free when neither logits nor tensors refer to it."""

    def __init__(self) -> None:
        self._rooms: list[ctypes.Array[ctypes.c_float]] = []

    def take(self, count: int, width: int) -> LogitBuffer:
        """Return a buffer for `count` rows of undefined content."""
        needed = count * width + ALIGNMENT // FLOAT_BYTES
        room = self._free(needed) or self._new(needed)
        address = ctypes.addressof(room)
        return LogitBuffer(room, address + -address % ALIGNMENT)

    def clear(self) -> None:
        """Keep no buffer; the memory of those that are in use is freed with the last reference to them."""
        self._rooms = []

    def _free(self, needed: int) -> ctypes.Array[ctypes.c_float] | None:
        for room in self._rooms:
            if len(room) >= needed and sys.getrefcount(room) == UNREAD:
                return room
        return None

    def _new(self, needed: int) -> ctypes.Array[ctypes.c_float]:
        room = (ctypes.c_float * needed)()
        self._rooms = [room, *self._rooms[: KEPT - 1]]
        return room
