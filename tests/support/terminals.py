"""A command in a pseudo-terminal: keys are typed, and the screen's bytes are read. Not a test itself."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence

import forked

PROGRAM = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from draftree.cli.main import main; main(sys.argv[1:])"
)
"""Makes the pseudo-terminal the controlling one, so that Ctrl-C and Ctrl-D act as on any terminal."""
PATIENCE_SECONDS = 600
SHOWN = 2000
"""Characters of the screen in the message of a failed test."""
CTRL_C, CTRL_D, ENTER, UP = "\x03", "\x04", "\r", "\x1b[A"
PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x01\x02]")


class Terminal:
    """A running command in a pseudo-terminal.

    Attributes:
        screen: everything that was written so far, escapes included.
    """

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.screen = ""
        self._master = master
        self._seen = 0

    def type(self, keys: str) -> None:
        """Send keys."""
        os.write(self._master, keys.encode())

    def enter(self, line: str) -> None:
        """Send a line and Enter."""
        self.type(line + ENTER)

    def wait_for(self, text: str) -> str:
        """Read until a text appears after everything that was waited for; return all up to its end, without escapes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (place := plain(self.screen[self._seen :]).find(text)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen[-SHOWN:]!r}"
            assert self._read(), f"the command ended before {text!r}: {self.screen[-SHOWN:]!r}"
        shown = plain(self.screen[self._seen :])[: place + len(text)]
        self._seen = self._end_of(shown)
        return shown

    def end(self) -> int:
        """Read until the command ends; return its exit status."""
        while self._read():
            pass
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def settings(self) -> list[object]:
        """The terminal's settings."""
        return termios.tcgetattr(self._master)

    def _end_of(self, shown: str) -> int:
        """Index in the screen after text that was shown since `_seen`."""
        for end in range(self._seen, len(self.screen) + 1):
            if plain(self.screen[self._seen : end]).startswith(shown):
                return end
        raise AssertionError("the text is not on the screen")

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], PATIENCE_SECONDS)
        assert ready, f"nothing was written for {PATIENCE_SECONDS} s: {self.screen[-SHOWN:]!r}"
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            piece = b""
        self.screen += piece.decode(errors="replace")
        return bool(piece)


def plain(text: str) -> str:
    """The text without escapes."""
    return ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "")


@contextlib.contextmanager
def terminal(
    arguments: Sequence[str], *, program: str = PROGRAM, is_forked: bool = True, **environment: str
) -> Iterator[Terminal]:
    """Run `draftree` with arguments, or another program, in a pseudo-terminal of 24 lines and 100 columns.

    A forked process has torch already; any other one imports it.
    """
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    process = subprocess.Popen(
        [*(forked.python() if is_forked else [sys.executable]), "-c", program, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "LANG": "C.UTF-8", "INPUTRC": os.devnull, **environment},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(master)
