"""Tokenizers of an unknown kind: a short window of the last ids is decoded for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftree.text.streams.base import BROKEN, Decode, TextStream, text_after


class WindowStream(TextStream):
    """Stream that decodes the last few ids for every token; for tokenizers of an unknown kind.

    Assumes that text depends on ids nearby only, that at most three U+FFFD at its end may still become a
    character, and that nothing before them changes.
    """

    CONTEXT = 8
    TAIL = 4

    def __init__(self, decode: Decode, byte_ids: frozenset[int]) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that was returned
        self._slide_beyond = 2 * self.CONTEXT

    @classmethod
    def opener(cls, decode: Decode, byte_ids: frozenset[int]) -> Callable[[], TextStream]:
        """Return an opener of streams over this decoding; `byte_ids` are the tokens <0x00> to <0xFF>."""
        return lambda: cls(decode, byte_ids)

    def push(self, token_id: int) -> str:
        """Return the new text of the window, without the end that may still change."""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""  # as in ByteFallbackStream: a run has text only at its end
        text = self._decode(self._window)
        certain = text
        for _ in range(3):
            certain = certain.removesuffix(BROKEN)
        piece = text_after(self._shown, certain)
        self._shown += piece
        if len(self._window) > self._slide_beyond:
            self._slide(text)
        return piece

    def num_held_before(self, token_id: int) -> int:
        """Return the characters of the window that were not returned; before a byte those that are complete."""
        held = text_after(self._shown, self._decode(self._window)) if self._window else ""
        return len(held.rstrip(BROKEN) if token_id in self._byte_ids else held)

    def finish(self) -> str:
        """Return the rest of the window's text."""
        return text_after(self._shown, self._decode(self._window)) if self._window else ""

    def follow(self, ids: Sequence[int]) -> None:
        """Fill the window with these ids."""
        self._window = list(ids[-self.CONTEXT :])
        self._shown = self._decode(self._window) if self._window else ""

    def _slide(self, text: str) -> None:
        """Drop the oldest ids if the text continues in the same way without them."""
        rest = text_after(self._shown, text)
        shorter = self._decode(self._window[self.CONTEXT :])
        shown = shorter.removesuffix(rest)
        tail = shown.lstrip(BROKEN)[-self.TAIL :]
        # a window without visible text could take a later token for the first one of all
        if shown + rest == shorter and tail.strip() and self._shown.endswith(tail):
            del self._window[: self.CONTEXT]
            self._shown = shown
            self._slide_beyond = 2 * self.CONTEXT
        else:
            self._slide_beyond = len(self._window) + self.CONTEXT
