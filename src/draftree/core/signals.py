"""Termination of the process as an exception, so that cleanup runs."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

__all__ = ["leaving_on_signals"]

SIGNALLED = 128
"""Offset from a signal number to the exit status of a process that the signal ended."""
INTERRUPT_SECONDS = 0.01
NAMES = ("SIGTERM", "SIGHUP")


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Raise `SystemExit` with the status that a shell would report on a termination or a lost terminal.

    Handlers that the program has set stay in place; threads other than the main one are not affected. Ctrl-C during a
    finalizer, where Python drops exceptions, interrupts the main thread directly after it.
    """
    taken, hook = [], sys.unraisablehook
    sys.unraisablehook = partial(_interrupt_again, hook)
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
        taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _interrupt_again(hook: Callable[[Any], Any], dropped: Any) -> None:
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        threading.Timer(INTERRUPT_SECONDS, _interrupt_main).start()  # at once, it would be dropped again
    else:
        hook(dropped)


def _interrupt_main() -> None:
    if hasattr(signal, "pthread_kill"):  # a real signal ends calls that wait
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(SIGNALLED + number)
