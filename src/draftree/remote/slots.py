"""Slots of a remote target, and its picks in place of logits."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar, final

from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Slot, SlotRequest
from draftree.sampling.history import History
from draftree.sampling.logits import Logits, Picks, RowNoise, Top

__all__ = ["PickedRows", "RemoteSlot", "crc_of"]


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


@final
class PickedRows(Logits):
    """The target's picks at rows of a pass; -1 at rows beside the accepted path.

    Args:
        tokens: the pick of each row.
        width: tokens of the vocabulary.
    """

    __slots__ = ("_tokens", "_width")
    has_controls: ClassVar[bool] = True

    def __init__(self, tokens: Sequence[int], width: int) -> None:
        self._tokens, self._width = list(tokens), width

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self._tokens)

    @property
    def width(self) -> int:
        """Tokens of the vocabulary."""
        return self._width

    def tensor(self) -> Tensor:
        """Raise: the server sends no logits."""
        raise UnsupportedModelError("a remote target returns accepted tokens and no logits: leave out what needs them")

    def rows(self, start: int, stop: int) -> PickedRows:
        """Some rows."""
        return PickedRows(self._tokens[start:stop], self._width)

    def narrowed(self, width: int) -> PickedRows:
        """Return the same picks: there are no columns."""
        return self

    def replaced(self, tensor: Tensor) -> Logits:
        """Raise as `tensor`."""
        self.tensor()
        return self

    def picks(self, noise: RowNoise) -> Picks:
        """The server's picks, under the request's controls and noise."""
        return Picks(list(self._tokens), [True] * len(self._tokens))

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        """Raise as `tensor`."""
        self.tensor()
        return Top([], [], [])
