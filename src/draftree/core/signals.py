"""Termination of the process as an exception, so that cleanup runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["leaving_on_signals"]

SIGNALLED = 128
"""Offset from a signal number to the exit status of a process that the signal ended."""
NAMES = ("SIGTERM", "SIGHUP")


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Raise `SystemExit` with the status that a shell would report on a termination or a lost terminal.

    Handlers that the program has set stay in place; threads other than the main one are not affected.
    """
    taken = []
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
        taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(SIGNALLED + number)
