"""Standard streams: closed, broken or full ones become an exit status and one sentence."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from draftree.core.errors import harmless

__all__ = ["drop_output", "open_standard_files", "tame_log"]


def open_standard_files() -> None:
    """Replace closed standard streams by the null device.

    The next opened file would take the stream's number, and a library's output would be written to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, for as long as the process


def drop_output() -> None:
    """Redirect broken streams to the null device: Python flushes standard output once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _drop_if_broken(stream)


def _drop_if_broken(stream: TextIO) -> None:
    try:
        stream.flush()
    except (OSError, ValueError):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):
            return  # it has no file descriptor


class HarmlessFormatter(logging.Formatter):
    """Formatter that escapes characters that control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Format as the base class, escaped."""
        return harmless(super().format(record))


def tame_log() -> None:
    """Log warnings to standard error as plain text, unless the program has configured logging."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(HarmlessFormatter())
