"""Progress bar for the generation of many texts."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self


class ProgressBar:
    """Bar on standard error with the number of finished texts and of tokens.

    Args:
        total: number of texts.
        shown: True or False; None shows it on a terminal if there are several texts.
    """

    def __init__(self, total: int, *, shown: bool | None) -> None:
        self._progress: Any = None
        self._total = total
        self.is_shown = total > 1 and sys.stderr.isatty() if shown is None else shown

    def __enter__(self) -> Self:
        if self.is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("writing"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total, tokens=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, num_done: int, num_tokens: int) -> None:
        """Update the number of finished texts and the total number of tokens."""
        if self._progress is not None:
            self._progress.update(self._task, completed=num_done, tokens=num_tokens)
