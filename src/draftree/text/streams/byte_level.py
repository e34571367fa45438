"""Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM): every token stands for bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from draftree.text.streams.base import TextStream


class ByteLevelStream(TextStream):
    """Stream in which every token is bytes, and the text is these bytes decoded as UTF-8."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def opener(cls, tokens: Mapping[int, str]) -> Callable[[], TextStream]:
        """Return an opener of streams that share one table of ids."""

        @cache
        def bytes_of(token_id: int) -> bytes:
            return byte_level_bytes(tokens.get(token_id, ""))

        return lambda: cls(bytes_of)

    def push(self, token_id: int) -> str:
        """Return the characters whose last byte is in this token."""
        return self._reader.decode(self._bytes_of(token_id))

    def num_held_before(self, token_id: int) -> int:
        """Return 0: only incomplete characters are held back."""
        return 0

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete."""
        return self._reader.decode(b"", final=True)

    def follow(self, ids: Sequence[int]) -> None:
        """No-op: the beginning of a text is not special."""


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token in its vocabulary form."""
    alphabet = byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode("utf-8")  # an added token is stored verbatim


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that byte-level tokenizers write for them.

    A printable character of Latin-1 stands for its own code; the other bytes, in order, are written as the
    characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
