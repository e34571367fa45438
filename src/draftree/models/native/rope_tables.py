"""Tables of cosines and sines for passes in C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from draftree.models.native.rotary import Rope
from draftree.models.native.structures import CPass

FIRST_POSITIONS = 1024


@final
class RopeTables:
    """Tables of cosines and sines, computed once for every position.

    Args:
        ropes: kinds of rotary positions.
    """

    def __init__(self, ropes: Sequence[Rope]) -> None:
        self._ropes = ropes
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._length = 0

    def point(self, run: CPass, *, longest: int) -> None:
        """Set the tables of a pass whose positions are below `longest`."""
        if longest > self._length:
            self._length = max(2 * self._length, longest, FIRST_POSITIONS)
            self._tables = [rope.table(self._length) for rope in self._ropes]
            for kind, (cosines, sines) in enumerate(self._tables):
                run.cosines[kind], run.sines[kind] = cosines.data_ptr(), sines.data_ptr()
            run.rotary_dim = self._tables[0][0].shape[-1] if self._tables else 0
