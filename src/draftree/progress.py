"""Generation of many texts as one batch, with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from draftree.engine.engine import Engine
from draftree.engine.sequence import Update, WritingSequence


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


def write_all(
    engine: Engine,
    batch: Sequence[Sequence[WritingSequence]],
    *,
    on_update: Callable[[Update], None] | None,
    progress: bool | None,
) -> None:
    """Queue requests and step the engine until all of them are finished; aborts them if a step raises.

    Args:
        engine: the engine; its other sequences advance as well, and keep their updates.
        batch: the new sequences of each request.
        on_update: called with every update of these sequences.
        progress: whether to show a progress bar; None shows one on a terminal, for several texts without `on_update`.
    """
    sequences = [sequence for request in batch for sequence in request]

    def observe() -> tuple[list[Update | None], list[WritingSequence]]:
        updates = [] if on_update is None else [sequence.take_update() for sequence in going]
        return updates, [sequence for sequence in going if not sequence.is_finished]

    with ProgressBar(len(sequences), shown=False if progress is None and on_update else progress) as bar:
        engine.add(*sequences)
        going = list(sequences)
        try:
            while going:
                if not all(sequence.is_finished for sequence in going):  # steps of other threads finish them too
                    engine.step()
                updates, going = engine.lock.between(observe)
                for update in updates:
                    if on_update is not None and update is not None:
                        on_update(update)
                if bar.is_shown:
                    bar.show(len(sequences) - len(going), sum(s.history.num_output_tokens for s in sequences))
        finally:
            engine.abort(sequences)
