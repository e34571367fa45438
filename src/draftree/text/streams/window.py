"""Tokenizers that are not known more closely: the text of a short window of ids is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftree.text.streams.base import BROKEN, Decode, TextStream, text_after


class WindowStream(TextStream):
    """Asks the tokenizer for the text of the last few ids: for tokenizers that are not known more closely.

    Assumes that text depends on ids nearby only, that at most three U+FFFD at its end may still become a
    character, and that nothing before them changes.
    """

    CONTEXT = 8
    TAIL = 4

    def __init__(self, decode: Decode, byte_ids: frozenset[int]) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._shown = ""  # the window's text as far as it was given out
        self._slide_beyond = 2 * self.CONTEXT

    @classmethod
    def opener(cls, decode: Decode, byte_ids: frozenset[int]) -> Callable[[], TextStream]:
        """Opens streams over this decoding; `byte_ids` are the tokens <0x00> to <0xFF>."""
        return lambda: cls(decode, byte_ids)

    def push(self, token_id: int) -> str:
        """What the window's text has now, less what may still change."""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""  # as in ByteFallbackStream: what the run says is known at its end
        text = self._decode(self._window)
        certain = text
        for _ in range(3):
            certain = certain.removesuffix(BROKEN)
        piece = text_after(self._shown, certain)
        self._shown += piece
        if len(self._window) > self._slide_beyond:
            self._slide(text)
        return piece

    def finish(self) -> str:
        """What the window's text has beyond what was given out."""
        return text_after(self._shown, self._decode(self._window)) if self._window else ""

    def follow(self, ids: Sequence[int]) -> None:
        """The window begins with these ids."""
        self._window = list(ids[-self.CONTEXT :])
        self._shown = self._decode(self._window) if self._window else ""

    def _slide(self, text: str) -> None:
        """Forgets the oldest ids, if the text goes on in the same way without them."""
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
