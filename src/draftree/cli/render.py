"""Terminal output: accepted tokens green, notes and progress on standard error, statistics in one line."""

from __future__ import annotations

import enum
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from draftree.core.errors import harmless
from draftree.weights.cache import Step, steps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from draftree.engine.sequence import Piece
    from draftree.outputs import CompletionStats

INTERRUPTED = 130  # exit status after Ctrl-C
GREEN = "\x1b[32m"
BOLD = "\x1b[1m"
DIM = "\x1b[2m"
RESET = "\x1b[0m"


class Colour(enum.StrEnum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def is_terminal(stream: TextIO | None) -> bool:
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
        return self._in(GREEN, text)

    def bold(self, text: str) -> str:
        return self._in(BOLD, text)

    def dim(self, text: str) -> str:
        return self._in(DIM, text)

    def pieces(self, pieces: Iterable[Piece]) -> str:
        """Style text so that accepted pieces stand out."""
        runs = groupby(pieces, key=lambda piece: piece.drafted)
        texts = ((drafted, "".join(piece.text for piece in run)) for drafted, run in runs)
        return "".join(self.accepted(text) if drafted else text for drafted, text in texts)

    def _in(self, code: str, text: str) -> str:
        return f"{code}{text}{RESET}" if self.coloured and text else text


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write one line to standard error, after all output so far."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def decode_rate(stats: Sequence[CompletionStats]) -> float:
    """Return decoded tokens per second of completions of one batch, the rounds that read the prompt excluded."""
    longest = max(completion.decode_seconds for completion in stats)
    if longest == 0:  # one round each
        return max(completion.tokens_per_second for completion in stats)
    return sum(completion.tokens_per_second * completion.decode_seconds for completion in stats) / longest


def decoding_line(stats: Sequence[CompletionStats], seconds: float, *, drafted: bool) -> str:
    """Return the statistics of one or several texts in one line."""
    tokens = sum(completion.completion_tokens for completion in stats)
    rounds = sum(completion.rounds for completion in stats)
    line = f"{tokens} tokens in {seconds:.2f} s, decode {decode_rate(stats):.1f} tokens/s"
    return f"{line}, acceptance length {tokens / rounds:.2f}, {rounds} rounds" if drafted else line


def short_count(count: int | None) -> str:
    """Return a number of weights, such as "135 M"; empty for None."""
    if count is None:
        return ""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def short_bytes(count: int | None) -> str:
    """Return a number of bytes, such as "1.4 GB"; empty for None."""
    if count is None:
        return ""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# Progress of slow steps on standard error, if it is a terminal: one line per step, nothing through a pipe.
#
# Steps with a known size, such as downloads, have a bar with their rate. Other steps have a line with their name, and
# with their duration when they are done.

CLEAR_LINE = "\r\x1b[K"
SHOW_CURSOR = "\x1b[?25h"
STEPS: dict[Step, str] = {"download": "downloading", "check": "reading", "convert": "unpacking"}
STEP_LOGGERS = (steps.name, "draftree.models.native.build")  # loggers of which each INFO record announces a slow step


@contextmanager
def transient_bar(text: str, total: int, *, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a bar that counts to a total; yields a function that updates it, with the keywords of rich's `update`."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        *(progress.BarColumn(), progress.MofNCompleteColumn()),
        *(progress.TimeElapsedColumn(), progress.TimeRemainingColumn()),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.update, bar.add_task(text, total=total, completed=done))


def wide_console(width: int) -> Console:
    """Return a console for tables, which must not be truncated in a file or a pipe that has no width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


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
    """Handler that shows the current step in the last line of a terminal, and finished ones above it."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.INFO)
        self._step: str | None = None
        self._since = 0.0
        write(f"{harmless(text)} …")

    def emit(self, record: logging.LogRecord) -> None:
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
    from draftree.loading.resolve import prepared_folder

    with progress_bars(name) as report:
        return prepared_folder(name, fetch=fetch, progress=report)


@contextmanager
def progress_bars(name: str) -> Iterator[Callable[[Step, int, int], None]]:
    """One bar per step; a step's bar appears with its first report."""
    bars: Progress | None = None
    tasks: dict[Step, Any] = {}

    def report(step: Step, done_bytes: int, total_bytes: int) -> None:
        nonlocal bars
        if not is_terminal(sys.stderr):
            return
        from rich import progress
        from rich.console import Console
        from rich.markup import escape

        if bars is None:
            columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
            bars = progress.Progress(
                progress.TextColumn("{task.description}"),
                *columns,
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                # a signal may arrive while rich writes: the message that follows must bypass it
                redirect_stdout=False,
                redirect_stderr=False,
            )
            bars.start()
        if step not in tasks:
            tasks[step] = bars.add_task(escape(harmless(f"{name}: {STEPS[step]}")), total=total_bytes)
        bars.update(tasks[step], completed=done_bytes)

    try:
        yield report
    finally:
        if bars is not None:
            bars.stop()
            if sys.stderr is not None:
                write(SHOW_CURSOR)  # rich leaves the cursor hidden if a signal interrupts it
