"""Byte-fallback tokenizers (Llama 2, Mistral, Gemma): a token is text, or one byte of a character without a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from draftree.text.streams.base import BROKEN, TextStream, byte_of_name


@dataclass(frozen=True, slots=True)
class FallbackDecoding:
    """The decoding rules of a byte-fallback tokenizer.

    Attributes:
        replacements: (old, new) pairs, applied to each token in this order.
        strip_character: character that is removed from the beginning of the text.
        strip_count: maximum number of removed characters.
    """

    replacements: tuple[tuple[str, str], ...]
    strip_character: str
    strip_count: int

    def part_of(self, token: str) -> str | int:
        """Return the text or, as a number, the byte of a token in its vocabulary form."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = byte_of_name(token)
        return token if byte is None else byte


class ByteFallbackStream(TextStream):
    """Stream in which a token is text or, if named <0x00> to <0xFF>, one byte.

    A run of byte tokens is text only if all of its bytes together are UTF-8; if not, each becomes U+FFFD, even
    those that form characters. So a run is held back until it ends.
    """

    def __init__(self, part_of: Callable[[int], str | int | None], decoding: FallbackDecoding) -> None:
        self._part_of = part_of
        self._strip_character = decoding.strip_character
        self._strip_left = decoding.strip_count
        self._run = bytearray()

    @classmethod
    def opener(cls, tokens: Mapping[int, str], decoding: FallbackDecoding) -> Callable[[], TextStream]:
        """Return an opener of streams that share one table of ids."""

        @cache
        def part_of(token_id: int) -> str | int | None:
            token = tokens.get(token_id)
            return None if token is None else decoding.part_of(token)

        return lambda: cls(part_of, decoding)

    def push(self, token_id: int) -> str:
        """Return the run of bytes that this token ends, and its own text."""
        part = self._part_of(token_id)
        if part is None:
            return ""
        if isinstance(part, int):
            self._run.append(part)
            return ""
        return self._stripped(self._end_run() + part)

    def num_held_before(self, token_id: int) -> int:
        """Return the characters of the run of bytes; before another byte those that are complete."""
        if isinstance(self._part_of(token_id), int):
            return len(self._run.decode("utf-8", errors="ignore"))
        return len(_text_of(self._run))

    def finish(self) -> str:
        """Return the run of bytes at the end of the sequence."""
        return self._stripped(self._end_run())

    def follow(self, ids: Sequence[int]) -> None:
        """Turn stripping off: only the beginning of a text is stripped."""
        if ids:
            self._strip_left = 0

    def _end_run(self) -> str:
        text = _text_of(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_character:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


def _text_of(run: bytearray) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return BROKEN * len(run)
