"""Input of a chat: messages of one or several lines, from a terminal or from a pipe."""

from __future__ import annotations

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftree.cli.render import Style, say
from draftree.core.errors import InvalidRequestError

__all__ = ["MessageReader", "PipeReader", "TerminalReader"]

BLOCK = '"""'
CONTINUES = "\\"
SIGNAL_SECONDS = 0.2
PROMPT, MORE = ">>> ", "... "


class MessageReader(ABC):
    """Reads messages: a line that ends with a backslash continues, and a block between triple quotes keeps its lines.

    A text that was pasted with its line breaks is one message, unchanged.
    """

    @abstractmethod
    def line(self, *, is_first: bool) -> str | None:
        """Return the next line without its line break; None at the end of the input."""

    def message(self) -> str | None:
        """Return the next message; None at the end of the input.

        Raises:
            InvalidRequestError: the input ends in a block, or after a backslash.
        """
        line = self.line(is_first=True)
        if line is None:
            return None
        if line.lstrip().startswith(BLOCK) and "\n" not in line:
            return self._block(line.lstrip().removeprefix(BLOCK))
        lines = []
        while line.endswith(CONTINUES):
            lines.append(line.removesuffix(CONTINUES))
            line = self._next("a line ended with a backslash")
        return "\n".join([*lines, line]).rstrip("\n")

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = self._next(f"a block began with {BLOCK}")
        text = "\n".join([*lines, line.rstrip().removesuffix(BLOCK)])
        return text.removeprefix("\n").removesuffix("\n")

    def _next(self, case: str) -> str:
        line = self.line(is_first=False)
        if line is None:
            raise InvalidRequestError(f"the input has no more lines, but {case}: complete the message")
        return line


class PipeReader(MessageReader):
    """Reads lines from standard input, which is not a terminal.

    Attributes:
        number: number of the last line that was read, from 1.
    """

    def __init__(self) -> None:
        self.number = 0

    def line(self, *, is_first: bool) -> str | None:
        """Return the next line.

        Raises:
            InvalidRequestError: it is not UTF-8.
        """
        raw = b"" if sys.stdin is None else sys.stdin.buffer.readline()
        if not raw:
            return None
        self.number += 1
        try:
            return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                f"it is not UTF-8 text (byte {error.start} is invalid): convert it, for example with iconv"
            ) from error


class TerminalReader(MessageReader):
    """Reads lines from the terminal, with editing and a history of messages where readline is available.

    Args:
        style: style of the prompt.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._readline = _readline()

    def line(self, *, is_first: bool) -> str | None:
        """Return the next line; Ctrl-D on an empty line ends the input.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        prompt = PROMPT if is_first else MORE
        try:
            with noticing_signals():
                return input(self._shown(prompt))
        except EOFError:
            say("\n")
            return None

    def message(self) -> str | None:
        """Return the next message, which joins the history as a whole."""
        message = super().message()
        if message and self._readline is not None:
            self._readline.add_history(message)
        return message

    def _shown(self, prompt: str) -> str:
        if not self._style.coloured or self._readline is None:
            return self._style.bold(prompt)
        # readline counts columns: escapes are marked as having no width
        before, after = self._style.bold("\0").split("\0")
        return f"\1{before}\2{prompt}\1{after}\2"


@contextmanager
def noticing_signals() -> Iterator[None]:
    """Handle signals within a fraction of a second while `input` waits.

    Python's readline module handles signals only when one interrupts its wait. One that arrives while it processes a
    key would stay unhandled until the next; a timer brings the next one.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return
    previous = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_SECONDS, SIGNAL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _readline() -> Any:
    """Return the readline module, set up for messages; None where Python has none."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)  # lines of one message join the history together
    readline.parse_and_bind("set enable-bracketed-paste on")
    return readline
