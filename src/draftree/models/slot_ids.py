"""Ids of slots: small numbers that identify a slot in another process."""

from __future__ import annotations

import heapq


class SlotIds:
    """Allocator of slot ids: the lowest free number for each new slot."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = 0

    @property
    def num_taken(self) -> int:
        """Number of ids in use."""
        return self._count - len(self._free)

    def take(self) -> int:
        """Take and return the lowest free number."""
        if self._free:
            return heapq.heappop(self._free)
        self._count += 1
        return self._count - 1

    def free(self, number: int) -> None:
        """Free a number."""
        heapq.heappush(self._free, number)
