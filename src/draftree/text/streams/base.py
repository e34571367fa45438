"""The interface of a text stream: each token returns the text that it completes; returned text never changes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>", re.ASCII)


class TextStream(ABC):
    """The text of one sequence, in pieces."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""

    @abstractmethod
    def num_held_before(self, token_id: int) -> int:
        """Return the number of characters that are held back and precede the text of this token, if it came next."""

    @abstractmethod
    def finish(self) -> str:
        """Return the remaining text; the stream is not used again."""

    @abstractmethod
    def follow(self, ids: Sequence[int]) -> None:
        """Continue the text of these ids, which is not returned, instead of starting a text; call before any push."""


def byte_of_name(token: str) -> int | None:
    """Return the byte of a token of the form <0xE6>; None for any other token."""
    if len(token) != 6:
        return None
    match = BYTE_NAME.fullmatch(token)
    return int(match[1], 16) if match else None


def text_after(shown: str, text: str) -> str:
    """Return the part of `text` after `shown`; "" if `text` does not start with it."""
    return text[len(shown) :] if text.startswith(shown) else ""
