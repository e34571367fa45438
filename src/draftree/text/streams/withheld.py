"""Tokenizers whose text changes as tokens follow: the text is returned when it is complete."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.text.streams.base import Decode, TextStream, text_after


class WithheldStream(TextStream):
    """Stream that returns the whole text at the end; for tokenizers whose text changes as tokens follow."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        """Store the id; returns no text."""
        self._ids.append(token_id)
        return ""

    def num_held_before(self, token_id: int) -> int:
        """Return the length of the text so far."""
        return len(self._text())

    def finish(self) -> str:
        """Return the whole text."""
        return self._text()

    def _text(self) -> str:
        if not self._ids:
            return ""
        return text_after(self._decode(self._before), self._decode(self._before + self._ids))

    def follow(self, ids: Sequence[int]) -> None:
        """Set the ids whose text precedes the returned text."""
        self._before = list(ids)
