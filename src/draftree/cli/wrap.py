"""Line wrapping of streamed text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from draftree.engine.sequence import Piece

__all__ = ["Wrapping"]

SPLIT = re.compile(r"(\n| +)")


class Wrapping:
    """Wraps text at a width. Holds a word back until its end is known. Mutated by `push` and `finish`.

    Args:
        width: columns; only a word longer than this makes a longer line.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap: list[Piece] = []
        self._word: list[Piece] = []

    def push(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces that are final after these."""
        for piece in pieces:
            for part in filter(None, SPLIT.split(piece.text)):
                here = Piece(part, piece.drafted)
                if part == "\n":
                    yield from self._place()
                    self._gap, self._column = [], 0
                    yield here
                elif part.isspace():
                    yield from self._place()
                    self._gap.append(here)
                else:
                    self._word.append(here)

    def finish(self) -> Iterator[Piece]:
        """Yield the last word; a new text may follow."""
        yield from self._place()
        self._gap, self._column = [], 0

    def _place(self) -> Iterator[Piece]:
        """Yield the complete word, after its gap or on a new line."""
        if not self._word:
            return
        gap, word = length(self._gap), length(self._word)
        if self._column and self._column + gap + word > self._width:
            yield Piece("\n", drafted=False)
            self._column = word
        else:
            yield from self._gap
            self._column += gap + word
        yield from self._word
        self._gap, self._word = [], []


def length(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.text) for piece in pieces)
