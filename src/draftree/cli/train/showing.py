"""Progress of a training: one line that is replaced on a terminal, a line each minute otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from draftree.cli.render import note, say

if TYPE_CHECKING:
    from draftree.train.evaluate import Evaluation
    from draftree.train.run_state import Progress

__all__ = ["Lines", "line_of", "say_result", "stopping"]

LINE_SECONDS = 60.0
INTERRUPTED = 130
CLEAR = "\r\x1b[K"


def line_of(progress: Progress) -> str:
    """Return the line of an update: share of the budget, loss, acceptance by level, speed, time left."""
    losses = " ".join(f"{value:.3f}" for value in progress.losses)
    rates = " ".join(f"{value:.2f}" for value in progress.acceptance)
    left = "" if progress.minutes_left is None else f", {progress.minutes_left:.1f} min left"
    return (
        f"{100 * progress.share:.0f} % update {progress.step}: {progress.loss} {losses}, overlap {rates}, "
        f"{progress.tokens_per_second:,.0f} tokens/s{left}"
    )


class Lines:
    """Shows progress on standard error."""

    def __init__(self) -> None:
        self._shown = float("-inf")
        self._replaces = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        """Show an update, an evaluation or a note."""
        if progress.note:
            self._line(progress.note)
        elif progress.score is not None:
            self._line(f"update {progress.step}: acceptance length {progress.score:.3f} on unseen texts")
        elif self._replaces:
            sys.stderr.write(CLEAR + line_of(progress))
            sys.stderr.flush()
        elif time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            note(line_of(progress))

    def _line(self, text: str) -> None:
        if self._replaces:
            sys.stderr.write(CLEAR)
        note(text)


@contextmanager
def stopping() -> Iterator[None]:
    """Report Ctrl-C: the last checkpoint stays."""
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted: the last checkpoint is kept; the same command with --resume continues")
        raise typer.Exit(INTERRUPTED) from None


def say_result(evaluation: Evaluation) -> None:
    """Print acceptance by depth, for each temperature of the texts."""
    for temperature, mode in evaluation.facts().items():
        rounds = mode["rounds"]["all"]
        rates = " ".join(f"{value:.3f}" for value in rounds["conditional"])
        say(
            f"temperature {temperature}: {rounds['acceptance_length']:.3f} tokens per round "
            f"in {rounds['drafts']:,} drafts; "
            f"accepted by depth {rates}; the draft vocabulary has {100 * mode['coverage']:.1f} % of the picks\n"
        )
