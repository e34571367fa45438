"""Input and output of the training loop: the drafter in training, the progress, and the log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from draftree.core.files import JsonError, parse_json
from draftree.train.evaluate import Evaluation
from draftree.train.losses import Loss
from draftree.train.unroll import StepTotals

__all__ = ["Progress", "RunState", "Trainee", "append_line", "read_log", "trim_log"]


class Trainee(Protocol):
    """A drafter in training, and its data."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are trained."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each text of training."""

    def count(self, texts: Sequence[int]) -> int:
        """Return the number of predictions of texts of training that the loss counts."""

    def gradients(self, texts: Sequence[int], *, total: float, loss: Loss, levels: int) -> list[StepTotals]:
        """Add the gradients of texts, given by index, and return sums by level; the loss is divided by `total`."""

    def check(self, texts: Sequence[int]) -> None:
        """Raise TrainingError if the data of these texts is damaged."""

    def evaluate(self, limit: int | None) -> Evaluation:
        """Return the acceptance on unseen texts, at most `limit` of them."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run, as stored in checkpoints.

    Attributes:
        step: updates so far, skipped ones included.
        tokens: predictions so far.
        seconds: duration so far.
        epoch: number of the current epoch.
        batch: batches of the epoch that are used up.
        splits: parts into which a batch is cut to fit in memory.
        skips: updates in a row that were skipped.
        best_score: best score of an evaluation; -1 before the first.
        best_step: its step.
        stale: evaluations since then.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    batch: int = 0
    splits: int = 1
    skips: int = 0
    best_score: float = -1.0
    best_step: int = 0
    stale: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Report of an update or an evaluation.

    Attributes:
        step: number of the update, from 1.
        share: used share of the budget.
        tokens: predictions so far.
        tokens_per_second: of the run so far.
        minutes_left: estimate; None before the first update.
        loss: name of the loss.
        losses: mean loss by level.
        acceptance: mean of sum min(p, q) by level.
        score: score of the evaluation; None for an update.
        note: one line about an event; empty if there is none.
    """

    step: int
    share: float
    tokens: int
    tokens_per_second: float
    minutes_left: float | None
    loss: str = ""
    losses: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()
    score: float | None = None
    note: str = ""


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; an unfinished last line is left out."""
    return list(_lines(path)) if path.exists() else []


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(JsonError):
            if isinstance(value := parse_json(line), dict) and isinstance(value.get("step"), int):
                yield value


def append_line(path: Path, state: RunState, facts: dict[str, Any]) -> None:
    """Add a line to a log."""
    line = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3)} | facts
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def trim_log(path: Path, state: RunState) -> None:
    """Create a log, or drop its lines that are newer than a state."""
    kept = [line for line in read_log(path) if line["step"] <= state.step] if state.step else []
    path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
