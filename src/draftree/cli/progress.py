"""Progress of slow steps on standard error, if it is a terminal: one line per step, nothing through a pipe.

Steps with a known size, such as downloads, have a bar with their rate. Other steps have a line with their name, and
with their duration when they are done.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from draftree.cli.render import is_terminal
from draftree.core.errors import harmless
from draftree.weights.progress import Step, steps

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["resolve_with_bar", "waiting"]

CLEAR_LINE = "\r\x1b[K"
SHOW_CURSOR = "\x1b[?25h"
STEPS: dict[Step, str] = {"download": "downloading", "check": "reading", "convert": "unpacking"}
STEP_LOGGERS = (steps.name, "draftree.models.native.build")
"""Loggers of which each INFO record announces a slow step."""


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a line while the block runs, and one line for each slow step that is logged meanwhile."""
    if not is_terminal(sys.stderr):
        yield
        return
    lines = StepLines(text)
    loggers = [logging.getLogger(name) for name in STEP_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
    try:
        yield
        lines.finish()
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(lines)
            logger.setLevel(level)
        write(CLEAR_LINE)


class StepLines(logging.Handler):
    """Handler that shows the current step in the last line of a terminal, and finished ones above it.

    Args:
        text: what is done before and between the steps.
    """

    def __init__(self, text: str) -> None:
        super().__init__(logging.INFO)
        self._step: str | None = None
        self._since = 0.0
        write(f"{harmless(text)} …")

    def emit(self, record: logging.LogRecord) -> None:
        """Show the next step."""
        if record.levelno == logging.INFO:
            self.finish()
            self._step, self._since = harmless(record.getMessage()), time.perf_counter()
            write(f"{CLEAR_LINE}{self._step} …")

    def finish(self) -> None:
        """Complete the line of the current step with its duration."""
        if self._step is not None:
            write(f"{CLEAR_LINE}{self._step}: {time.perf_counter() - self._since:.1f} s\n")
            self._step = None


def write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def resolve_with_bar(name: str, *, fetch: bool = True) -> Path:
    """Call `prepared_folder` with progress bars; bars appear only for slow steps."""
    from draftree.loading.prepared import prepared_folder

    with progress_bars(name) as report:
        return prepared_folder(name, fetch=fetch, progress=report)


@contextmanager
def progress_bars(name: str) -> Iterator[Callable[[Step, int, int], None]]:
    """One bar per step; a step's bar appears with its first report."""
    bars: Progress | None = None
    tasks: dict[Step, int] = {}

    def report(step: Step, done_bytes: int, total_bytes: int) -> None:
        nonlocal bars
        if not is_terminal(sys.stderr):
            return
        if bars is None:
            bars = new_bars()
            bars.start()
        if step not in tasks:
            from rich.markup import escape

            tasks[step] = bars.add_task(escape(harmless(f"{name}: {STEPS[step]}")), total=total_bytes)
        bars.update(tasks[step], completed=done_bytes)  # type: ignore[arg-type]

    try:
        yield report
    finally:
        if bars is not None:
            bars.stop()
            if sys.stderr is not None:
                write(SHOW_CURSOR)  # rich leaves the cursor hidden if a signal interrupts it


def new_bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        # a signal may arrive while rich writes: the message that follows must bypass it
        redirect_stdout=False,
        redirect_stderr=False,
    )
