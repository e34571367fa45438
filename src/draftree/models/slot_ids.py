"""Ids of slots: small numbers, so that a slot can be named in another process."""

from __future__ import annotations

import heapq


class SlotIds:
    """Gives the lowest free number to each slot that is opened."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = 0

    @property
    def num_taken(self) -> int:
        """Numbers in use."""
        return self._count - len(self._free)

    def take(self) -> int:
        """The lowest free number."""
        if self._free:
            return heapq.heappop(self._free)
        self._count += 1
        return self._count - 1

    def free(self, number: int) -> None:
        """Give a number back."""
        heapq.heappush(self._free, number)
