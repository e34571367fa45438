"""Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM): every token stands for bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from draftree.text.streams.base import TextStream


class ByteLevelStream(TextStream):
    """Every token stands for bytes, and the text is these bytes read as UTF-8."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def opener(cls, tokens: Mapping[int, str]) -> Callable[[], TextStream]:
        """Opens streams that share one table of what the ids stand for."""

        @cache
        def bytes_of(token_id: int) -> bytes:
            return byte_level_bytes(tokens.get(token_id, ""))

        return lambda: cls(bytes_of)

    def push(self, token_id: int) -> str:
        """The characters whose last byte this token brought."""
        return self._reader.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete."""
        return self._reader.decode(b"", final=True)

    def follow(self, ids: Sequence[int]) -> None:
        """The beginning of a text is like any other place."""


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token, as the vocabulary writes it, stands for."""
    alphabet = byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode("utf-8")  # an added token, written as it is


@cache
def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes.

    A printable character of Latin-1 stands for its own code; the other bytes, in order, are written as the
    characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
