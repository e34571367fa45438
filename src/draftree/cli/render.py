"""Terminal output: accepted tokens green, notes on standard error, statistics in one line."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from draftree.completion import CompletionStats
    from draftree.engine.sequence import Piece

__all__ = ["Colour", "Style", "decoding_line", "is_terminal", "note", "say"]

GREEN = "\x1b[32m"
BOLD = "\x1b[1m"
DIM = "\x1b[2m"
RESET = "\x1b[0m"


class Colour(enum.StrEnum):
    """When colours are used."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; a closed stream is None."""
    return stream is not None and stream.isatty()


@dataclass(frozen=True, slots=True)
class Style:
    """Terminal styles, or none."""

    coloured: bool

    @classmethod
    def chosen(cls, colour: Colour, stream: TextIO | None) -> Style:
        """Choose the style of a stream. Automatic: colours on a capable terminal, unless NO_COLOR is set."""
        if colour is not Colour.AUTO:
            return cls(colour is Colour.ALWAYS)
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(wanted and is_terminal(stream))

    def accepted(self, text: str) -> str:
        """Style drafted and accepted text."""
        return self._in(GREEN, text)

    def bold(self, text: str) -> str:
        """Style a heading."""
        return self._in(BOLD, text)

    def dim(self, text: str) -> str:
        """Style less important text."""
        return self._in(DIM, text)

    def pieces(self, pieces: Iterable[Piece]) -> str:
        """Style text so that accepted pieces stand out."""
        runs = groupby(pieces, key=lambda piece: piece.drafted)
        texts = ((drafted, "".join(piece.text for piece in run)) for drafted, run in runs)
        return "".join(self.accepted(text) if drafted else text for drafted, text in texts)

    def _in(self, code: str, text: str) -> str:
        return f"{code}{text}{RESET}" if self.coloured and text else text


def say(text: str) -> None:
    """Write text to standard output and flush it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write one line to standard error, after all output so far."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def decode_rate(stats: Sequence[CompletionStats]) -> float:
    """Return decoded tokens per second of completions of one batch, the rounds that read the prompt excluded."""
    longest = max(one.decode_seconds for one in stats)
    if longest == 0:  # one round each
        return max(one.tokens_per_second for one in stats)
    return sum(one.tokens_per_second * one.decode_seconds for one in stats) / longest


def decoding_line(stats: Sequence[CompletionStats], seconds: float, *, drafted: bool) -> str:
    """Return the statistics of one or several texts in one line."""
    tokens = sum(one.completion_tokens for one in stats)
    rounds = sum(one.rounds for one in stats)
    line = f"{tokens} tokens in {seconds:.2f} s, decode {decode_rate(stats):.1f} tokens/s"
    return f"{line}, acceptance length {tokens / rounds:.2f}, {rounds} rounds" if drafted else line
