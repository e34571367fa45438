"""The loop of training: updates, evaluations, checkpoints, early stopping, and what to do when memory or numbers fail.

A run is a function of its data, settings and seed: resumed from a checkpoint, it continues with the same updates. Only
a limit in minutes depends on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import is_out_of_memory
from draftree.core.files import MALFORMED
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.train.batches import pack
from draftree.train.checkpoints import load_checkpoint, require_same_run, save_checkpoint
from draftree.train.errors import TrainingError
from draftree.train.losses import Loss, loss_named
from draftree.train.optimizer import MasterOptimizer, learning_rate
from draftree.train.processes import Processes
from draftree.train.run_state import Progress, RunState, Trainee, append_line, trim_log
from draftree.train.settings import TrainSettings
from draftree.train.unroll import StepTotals

__all__ = ["BEST", "CHECKPOINT", "LOG", "TrainingRun"]

CHECKPOINT, BEST, LOG = "checkpoint.safetensors", "best.safetensors", "log.jsonl"
SECONDS_BETWEEN_CHECKPOINTS = 120.0
LEAST_GAIN = 1e-4
"""Smallest increase of the score that counts as better."""


class TrainingRun:
    """A run in a folder.

    Args:
        trainee: what is trained.
        settings: the settings.
        folder: where checkpoints and the log are.
        processes: the processes of the run.
        report: called with every update and evaluation, in the first process only.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        trainee: Trainee,
        settings: TrainSettings,
        folder: Path,
        processes: Processes,
        *,
        report: Callable[[Progress], None] = lambda progress: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._trainee, self._settings, self._folder = trainee, settings, folder
        self._processes, self._report, self._clock = processes, report, clock
        self._optimizer = MasterOptimizer(trainee.module, settings)
        self._state = RunState()
        self._start = 0.0
        self._saved_at = 0.0
        self._batches: list[list[int]] | None = None

    @property
    def state(self) -> RunState:
        """Progress so far."""
        return self._state

    @property
    def num_weights(self) -> int:
        """Number of trained weights."""
        return self._optimizer.num_weights

    def resume(self) -> None:
        """Continue from the folder's checkpoint.

        Raises:
            TrainingError: there is no checkpoint, or it is of other settings, other texts or another drafter.
        """
        path = self._folder / CHECKPOINT
        tensors, facts = load_checkpoint(path)
        require_same_run(path, facts, self._same())
        try:
            self._optimizer.load(tensors)
            self._state = RunState(**facts["state"])
        except (RuntimeError, *MALFORMED) as error:
            raise TrainingError(f"{path} is of another drafter ({error}): start a new run in another folder") from None

    def run(self) -> RunState:
        """Train until a limit or until the score stops rising; the module then has the weights of the best evaluation.

        Raises:
            TrainingError: gradients stay not finite, the data is damaged, or one text needs too much memory.
        """
        self._start = self._clock() - self._state.seconds
        self._saved_at = self._clock()
        self._open_log()
        try:
            while self._progress() < 1 and not self._is_stale():
                self._update()
                if self._state.step % self._settings.evaluate_every == 0:
                    self._evaluate()
                    self._save()
                elif self._clock() - self._saved_at > SECONDS_BETWEEN_CHECKPOINTS:
                    self._save()
            if self._state.step % self._settings.evaluate_every:
                self._evaluate()
            self._save()
        finally:
            self._optimizer.clear()
        self._load_best()
        return self._state

    def _progress(self) -> float:
        state = self._state
        return self._settings.limits.progress(state.step, state.tokens, state.seconds / 60)

    def _seconds(self) -> float:
        """Return the duration so far, in all processes that of the first: they end at the same update."""
        own = self._clock() - self._start
        if self._processes.count == 1:
            return own
        shared = torch.tensor(own if self._is_first else 0.0, device=self._processes.device)
        return float(self._processes.total(shared))

    def _is_stale(self) -> bool:
        patience = self._settings.patience
        return patience is not None and self._state.stale >= patience

    def _next_texts(self) -> list[int]:
        """Return this process's part of the next batch."""
        state, count = self._state, self._processes.count
        if self._batches is None or state.batch >= len(self._batches):
            if self._batches is not None:
                state = self._state = replace(state, epoch=state.epoch + 1, batch=0)
            self._batches = self._pack(state.epoch)
        if state.batch >= len(self._batches):
            state = self._state = replace(state, epoch=state.epoch + 1, batch=0)
            self._batches = self._pack(state.epoch)
        mine = state.batch + self._processes.index
        self._state = replace(state, batch=state.batch + count)
        return self._batches[mine] if mine < len(self._batches) else []

    def _pack(self, epoch: int) -> list[list[int]]:
        settings = self._settings
        return list(pack(self._trainee.lengths, settings.batch_tokens, seed=settings.seed, epoch=epoch))

    def _update(self) -> None:
        progress = self._progress()
        texts = self._next_texts()
        state = self._state
        name, levels = self._settings.loss_at(progress), self._settings.levels_at(progress)
        count = self._sum(self._trainee.count(texts))
        totals = self._gradients(texts, float(count), loss_named(name), levels)
        norm = self._optimizer.update(learning_rate(self._settings, state.step, progress), self._processes.total)
        is_skipped = not math.isfinite(norm)
        self._state = replace(
            self._state,
            step=state.step + 1,
            tokens=state.tokens + int(count),
            seconds=self._seconds(),
            skips=state.skips + 1 if is_skipped else 0,
        )
        self._log({"kind": "update", "loss_name": name, "norm": norm, "levels": [asdict(one) for one in totals]})
        self._tell(loss=name, totals=totals)
        if is_skipped:
            self._skip(texts)

    def _skip(self, texts: Sequence[int]) -> None:
        """Report a skipped update; give up after some in a row."""
        self._trainee.check(texts)
        state = self._state
        self._note(f"update {state.step} is skipped: its gradient is not finite")
        if state.skips > self._settings.max_skips:
            raise TrainingError(
                f"the gradients of {state.skips} updates in a row are not finite: lower the learning rate "
                f"({self._settings.learning_rate:g}), or train in float32"
            )

    def _gradients(self, texts: Sequence[int], total: float, loss: Loss, levels: int) -> list[StepTotals]:
        """Add the gradients of a batch, in as many parts as memory needs."""
        while True:
            try:
                found: list[StepTotals] = []
                for part in _parts(texts, self._state.splits):
                    sums = self._trainee.gradients(part, total=max(1.0, total), loss=loss, levels=levels)
                    for level, one in enumerate(sums):
                        if level == len(found):
                            found.append(StepTotals())
                        found[level].add(one)
                return found
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self._state.splits >= len(texts):
                    longest = max(self._trainee.lengths[text] for text in texts)
                    raise TrainingError(
                        f"a text of {longest} tokens does not fit in memory: set a maximum length (--max-length), "
                        "fewer levels or a smaller draft vocabulary"
                    ) from error
            self._optimizer.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._state = replace(self._state, splits=2 * self._state.splits)
            self._note(f"out of memory: batches are now computed in {self._state.splits} parts, with the same result")

    def _evaluate(self) -> None:
        evaluation = self._trainee.evaluate(self._settings.evaluate_texts)
        score, state = evaluation.score, self._state
        is_better = score > state.best_score + LEAST_GAIN
        self._state = replace(
            state,
            seconds=self._seconds(),
            best_score=score if is_better else state.best_score,
            best_step=state.step if is_better else state.best_step,
            stale=0 if is_better else state.stale + 1,
        )
        self._log({"kind": "evaluation", "score": score, "modes": evaluation.facts()})
        self._tell(score=score)
        if is_better and self._is_first:
            save_checkpoint(self._folder / BEST, self._weights(), {"step": state.step, "score": score})
        if self._is_stale():
            self._note(f"stopped early: no better score in {self._state.stale} evaluations")

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._optimizer.state().items() if name.startswith("weight/")}

    def _save(self) -> None:
        self._saved_at = self._clock()
        if self._is_first:
            facts = self._same() | {"state": asdict(self._state)}
            save_checkpoint(self._folder / CHECKPOINT, self._optimizer.state(), facts)

    def _load_best(self) -> None:
        self._processes.wait()
        if self._state.best_score >= 0:
            self._optimizer.load(load_checkpoint(self._folder / BEST)[0])

    def _same(self) -> dict[str, Any]:
        """Return what must be equal in a resumed run; the order of batches depends on the lengths of the texts."""
        lengths = self._trainee.lengths
        return {"settings": self._settings.digest(), "texts": [len(lengths), sum(lengths)]}

    @property
    def _is_first(self) -> bool:
        return self._processes.index == 0

    def _sum(self, value: int) -> int:
        tensor = torch.tensor(
            float(value), dtype=torch.float64 if self._processes.device.type == "cpu" else torch.float32
        )
        return round(float(self._processes.total(tensor.to(self._processes.device))))

    def _tell(
        self, *, loss: str = "", totals: Sequence[StepTotals] = (), score: float | None = None, note: str = ""
    ) -> None:
        if not self._is_first:
            return
        state, share = self._state, self._progress()
        self._report(
            Progress(
                step=state.step,
                share=share,
                tokens=state.tokens,
                tokens_per_second=state.tokens / state.seconds if state.seconds > 0 else 0.0,
                minutes_left=state.seconds / 60 * (1 - share) / share if share > 0 else None,
                loss=loss,
                losses=tuple(one.loss / max(1, one.count) for one in totals),
                acceptance=tuple(one.accepted / max(1, one.count) for one in totals),
                score=score,
                note=note,
            )
        )

    def _note(self, text: str) -> None:
        self._log({"kind": "note", "text": text})
        self._tell(note=text)

    def _log(self, facts: dict[str, Any]) -> None:
        if self._is_first:
            append_line(self._folder / LOG, self._state, facts)

    def _open_log(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._is_first:
            trim_log(self._folder / LOG, self._state)
        self._processes.wait()


def _parts(texts: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    """Yield at most `count` parts of about equal sizes."""
    size = math.ceil(len(texts) / count)
    for start in range(0, len(texts), max(1, size)):
        yield texts[start : start + size]
