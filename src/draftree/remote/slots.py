"""Slots of a remote target."""

from __future__ import annotations

import zlib
from typing import final

from draftree.models.base import Slot, SlotRequest
from draftree.sampling.history import History

__all__ = ["RemoteSlot", "crc_of"]


def crc_of(history: History) -> int:
    """Return the CRC-32 of the tokens of prompt and text as little-endian 32-bit integers."""
    return zlib.crc32(history.tokens.astype("<i4").tobytes())


@final
class RemoteSlot(Slot):
    """The device's part of a text on the server. Mutated by `RemoteModel` only."""

    def __init__(self, number: int, text: int, request: SlotRequest) -> None:
        self._id, self.length_, self.tentative = number, 0, 0
        self.text, self.request = text, request
        self.is_done = False
        """Whether the text has ended on the server."""
        self.unread: list[int] = []
        """Tokens that the server wrote alone and the engine has not taken."""

    @property
    def id(self) -> int:
        """Lowest free number when the slot was opened."""
        return self._id

    @property
    def length(self) -> int:
        """Tokens in the committed prefix."""
        return self.length_

    @property
    def num_tentative(self) -> int:
        """Tokens in the tentative tree."""
        return self.tentative
