"""Memory for logits that is used again.

A pass over a vocabulary gives hundreds of kilobytes, and fresh memory of that size costs more than to search it: the
system fills it with zeros, page by page. So a buffer that is not referenced any more is overwritten by the next pass.
"""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

FLOAT_BYTES = 4
ALIGNMENT = 64
KEPT = 3
"""Rooms that are kept at most: the last pass's, and those of a pass or two whose logits are still read."""
UNREAD = 3
"""References to a room that is not in use: the list's, the loop's, and the one that asks."""


class RowsAt(NamedTuple):
    """Where rows of float32 are in the host's memory."""

    address: int
    rows: int
    stride: int
    """From row to row, in numbers."""
    width: int


class LogitBuffer(NamedTuple):
    """Memory for rows of floats."""

    memory: ctypes.Array[ctypes.c_float]
    address: int
    """Of the first row, within the memory."""


class LogitBufferPool:
    """Gives memory for rows of floats. A room is free again when neither logits nor tensors refer to it."""

    def __init__(self) -> None:
        self._rooms: list[ctypes.Array[ctypes.c_float]] = []

    def take(self, count: int, width: int) -> LogitBuffer:
        """Memory for so many rows, whose content is not defined."""
        needed = count * width + ALIGNMENT // FLOAT_BYTES
        room = self._free(needed) or self._new(needed)
        address = ctypes.addressof(room)
        return LogitBuffer(room, address + -address % ALIGNMENT)

    def _free(self, needed: int) -> ctypes.Array[ctypes.c_float] | None:
        for room in self._rooms:
            if len(room) >= needed and sys.getrefcount(room) == UNREAD:
                return room
        return None

    def _new(self, needed: int) -> ctypes.Array[ctypes.c_float]:
        room = (ctypes.c_float * needed)()
        self._rooms = [room, *self._rooms[: KEPT - 1]]
        return room
