"""A stream of text: a token goes in, the text that it completed comes out, and what came out never changes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>", re.ASCII)


class TextStream(ABC):
    """The text of one sequence, piece by piece."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""

    @abstractmethod
    def finish(self) -> str:
        """What is left when no token follows; the stream is not used again."""

    @abstractmethod
    def follow(self, ids: Sequence[int]) -> None:
        """Go on from the text of these ids, which is not given out, instead of beginning one; before any push."""


def byte_of_name(token: str) -> int | None:
    """The byte that a token of the form <0xE6> stands for; None for any other token."""
    if len(token) != 6:
        return None
    match = BYTE_NAME.fullmatch(token)
    return int(match[1], 16) if match else None


def text_after(shown: str, text: str) -> str:
    """What `text` has beyond `shown`; nothing if it is not a continuation of it."""
    return text[len(shown) :] if text.startswith(shown) else ""
