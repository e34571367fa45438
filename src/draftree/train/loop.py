"""The loop of training: updates, evaluations, checkpoints, early stopping, and what to do when memory or numbers fail.

A run is a function of its data, settings and seed: resumed from a checkpoint, it continues with the same updates. Only
a limit in minutes depends on the machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.core.errors import ConfigurationError, is_out_of_memory
from draftree.core.files import MALFORMED, JsonError, parse_json
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.train.batches import pack
from draftree.train.checkpoints import CHECKPOINT, TrainingError, load_checkpoint, save_checkpoint
from draftree.train.head_trainee import TextTrainee
from draftree.train.losses import Loss, loss_named
from draftree.train.preparing import Processes, Progress, Report, ignore
from draftree.train.settings import ADAMW, TrainSettings
from draftree.train.unroll import StepTotals


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run, as stored in checkpoints."""

    step: int = 0  # updates so far, skipped ones included
    tokens: int = 0  # predictions so far
    seconds: float = 0.0
    epoch: int = 0
    batch: int = 0  # batches of the epoch that are used up
    splits: int = 1  # parts into which a batch is cut to fit in memory
    skips: int = 0  # updates in a row that were skipped
    best_score: float = -1.0  # best score of an evaluation; -1 before the first
    best_step: int = 0
    stale: int = 0  # evaluations since the best


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; an unfinished last line is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(JsonError):
            if isinstance(value := parse_json(line), dict) and isinstance(value.get("step"), int):
                lines.append(value)
    return lines


# Optimizers in float32 for weights of any dtype, with a learning rate that depends on the used share of the budget.
#
# In bfloat16, an update is smaller than the distance of two numbers for most weights. Updates are therefore made on
# float32 copies, and the rounded result is used by the passes.
#
# Sources: AdamW, arXiv 1711.05101; Muon, arXiv 2502.16982, whose updates are scaled to the size of those of AdamW.

CLIP = 1.0  # maximum norm of gradients
MAX_SKIPS = 5  # updates in a row that may be skipped because a gradient is not finite
EVALUATED_TEXTS = 64  # unseen texts of an evaluation during training
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT = "weight"
TABLES = ("lm_head", "embed", "markov")  # parts of the names of matrices with one row or column for each token


def learning_rate(settings: TrainSettings, step: int, progress: float) -> float:
    """Return the learning rate of an update: a linear warm-up, then a cosine to 0."""
    rising = min(1.0, (step + 1) / settings.warm_up) if settings.warm_up else 1.0
    return settings.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * progress))


class MasterOptimizer:
    """AdamW or Muon on float32 copies of the trainable weights.

    Muon updates the matrices of layers. Gains, embeddings and output heads are updated by AdamW in any case.
    """

    def __init__(self, module: nn.Module, settings: TrainSettings) -> None:
        self._settings = settings
        self._used = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._master = {name: p.detach().float().clone() for name, p in self._used.items()}
        orthogonal = [
            name
            for name, master in self._master.items()
            if settings.optimizer != ADAMW and master.dim() == 2 and not any(part in name for part in TABLES)
        ]
        others = [master for name, master in self._master.items() if name not in orthogonal]
        rate, decay = settings.learning_rate, settings.weight_decay
        matrices = [master for master in others if master.dim() > 1]
        plain = [master for master in others if master.dim() <= 1]
        groups = [
            {"params": masters, "weight_decay": own_decay}
            for masters, own_decay in ((matrices, decay), (plain, 0.0))
            if masters
        ]
        self._optimizers: list[torch.optim.Optimizer] = []
        if groups:
            self._optimizers.append(torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPSILON))
        if orthogonal:
            if not hasattr(torch.optim, "Muon"):
                raise ConfigurationError("optimizer 'muon' needs torch 2.9 or later: choose 'adamw'")
            layers = [self._master[name] for name in orthogonal]
            self._optimizers.append(
                torch.optim.Muon(layers, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )

    @property
    def num_weights(self) -> int:
        return sum(master.numel() for master in self._master.values())

    def clear(self) -> None:
        for parameter in self._used.values():
            parameter.grad = None

    def update(self, rate: float, reduce: Callable[[Tensor], Tensor]) -> float:
        """Update the weights by their gradients; return the norm of the gradients before clipping.

        Nothing is updated if the norm is not finite.
        """
        for name, parameter in self._used.items():
            gradient = torch.zeros_like(self._master[name]) if parameter.grad is None else parameter.grad.float()
            self._master[name].grad = reduce(gradient)
        norm = float(torch.nn.utils.clip_grad_norm_(self._master.values(), CLIP))
        if math.isfinite(norm):
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            self._spread()
        for master in self._master.values():
            master.grad = None
        self.clear()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return the float32 weights and the moments, by name; tensors are shared."""
        moments = {
            f"{key}/{name}": value
            for name, master in self._master.items()
            for optimizer in self._optimizers
            for key, value in optimizer.state.get(master, {}).items()
        }
        return {f"{WEIGHT}/{name}": master for name, master in self._master.items()} | moments

    def load(self, state: dict[str, Tensor]) -> None:
        """Set weights and moments from `state`."""
        values: dict[str, dict[str, Tensor]] = {}
        for path, value in state.items():
            key, _, name = path.partition("/")
            values.setdefault(name, {})[key] = value
        for name, master in self._master.items():
            master.copy_(values[name].pop(WEIGHT))
        names = {id(master): name for name, master in self._master.items()}
        for optimizer in self._optimizers:
            for master in (master for group in optimizer.param_groups for master in group["params"]):
                # the counter stays on the host, moments are on the weight's device
                if moments := values[names[id(master)]]:
                    optimizer.state[master] = {
                        key: value.to("cpu" if key == "step" else master.device).clone()
                        for key, value in moments.items()
                    }
        self._spread()

    @torch.no_grad()
    def _spread(self) -> None:
        for name, parameter in self._used.items():
            parameter.copy_(self._master[name])


BEST, LOG = "best.safetensors", "log.jsonl"
SECONDS_BETWEEN_CHECKPOINTS = 120.0
LEAST_GAIN = 1e-4  # smallest increase of the score that counts as better


class TrainingRun:
    """A run in a folder; `report` is called with every update and evaluation, in the first process only."""

    def __init__(
        self,
        trainee: TextTrainee,
        settings: TrainSettings,
        folder: Path,
        processes: Processes,
        *,
        report: Report = ignore,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._trainee, self._settings, self._folder = trainee, settings, folder
        self._processes, self._report, self._clock = processes, report, clock
        self._optimizer = MasterOptimizer(trainee.module, settings)
        self._is_first = processes.index == 0
        self._start = self._saved_at = 0.0
        self._batches: list[list[int]] = []
        self.state = RunState()  # progress so far

    @property
    def num_weights(self) -> int:
        return self._optimizer.num_weights

    def resume(self) -> None:
        """Continue from the folder's checkpoint."""
        path = self._folder / CHECKPOINT
        tensors, facts = load_checkpoint(path)
        expected = self._same()
        if facts.get("settings") != expected["settings"]:
            raise TrainingError(
                f"{path} was made with other settings: resume with the same ones (only the limits may change), or "
                "start a new run in another folder"
            )
        before = facts.get("texts", expected["texts"])
        now = expected["texts"]
        if before != now:
            raise TrainingError(
                f"{path} was made with {before[0]:,} texts of {before[1]:,} tokens, and this run has {now[0]:,} of "
                f"{now[1]:,}: resume with the same data, or start a new run in another folder"
            )
        try:
            self._optimizer.load(tensors)
            self.state = RunState(**facts["state"])
        except (RuntimeError, *MALFORMED) as error:
            raise TrainingError(f"{path} is of another drafter ({error}): start a new run in another folder") from None

    def _same(self) -> dict[str, Any]:
        """Return what must be equal in a resumed run; the order of batches depends on the lengths of the texts."""
        lengths = self._trainee.lengths
        return {"settings": self._settings.digest(), "texts": [len(lengths), sum(lengths)]}

    def run(self) -> RunState:
        """Train until a limit or until the score stops rising; the module keeps the weights of the best evaluation."""
        self._start = self._clock() - self.state.seconds
        self._open_log()
        self._save()  # a run that is interrupted at once can be resumed too
        every = self._settings.evaluate_every
        try:
            while self._progress() < 1 and not self._is_stale():
                self._update()
                if self.state.step % every == 0:
                    self._evaluate()
                    self._save()
                elif self._clock() - self._saved_at > SECONDS_BETWEEN_CHECKPOINTS:
                    self._save()
            if self.state.step % every:
                self._evaluate()
            self._save()
        finally:
            self._optimizer.clear()
        self._processes.wait()
        if self.state.best_score >= 0:
            self._optimizer.load(load_checkpoint(self._folder / BEST)[0])
        return self.state

    def _open_log(self) -> None:
        """Create the log, or drop its lines that are newer than the state."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._is_first:
            path = self._folder / LOG
            kept = [line for line in read_log(path) if line["step"] <= self.state.step] if self.state.step else []
            path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._processes.wait()

    def _progress(self) -> float:
        return self._settings.limits.progress(self.state.step, self.state.tokens, self.state.seconds / 60)

    def _seconds(self) -> float:
        """Return the duration so far, in all processes that of the first: they end at the same update."""
        seconds = self._clock() - self._start
        if self._processes.count == 1:
            return seconds
        shared = torch.tensor(seconds if self._is_first else 0.0, device=self._processes.device)
        return float(self._processes.total(shared))

    def _is_stale(self) -> bool:
        patience = self._settings.patience
        return patience is not None and self.state.stale >= patience

    def _next_texts(self) -> list[int]:
        """Return this process's part of the next batch."""
        state = self.state
        settings = self._settings
        # a resumed run packs its epoch again; it may have used up its last batch
        while not self._batches or state.batch >= len(self._batches):
            if self._batches:
                state = replace(state, epoch=state.epoch + 1, batch=0)
            lengths = self._trainee.lengths
            seed = settings.seed
            self._batches = list(pack(lengths, settings.batch_tokens, seed=seed, epoch=state.epoch))
        mine = state.batch + self._processes.index
        self.state = replace(state, batch=state.batch + self._processes.count)
        return self._batches[mine] if mine < len(self._batches) else []

    def _update(self) -> None:
        progress = self._progress()
        texts = self._next_texts()
        state = self.state
        settings = self._settings
        device = self._processes.device
        name = settings.first_loss if progress < settings.first_share else settings.loss
        levels = 1 if progress < settings.levels_from else settings.levels
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        count = round(
            float(self._processes.total(torch.tensor(self._trainee.count(texts), dtype=dtype, device=device)))
        )
        totals = self._gradients(texts, float(count), loss_named(name), levels)
        norm = self._optimizer.update(learning_rate(settings, state.step, progress), self._processes.total)
        is_skipped = not math.isfinite(norm)
        self.state = replace(
            self.state,
            step=state.step + 1,
            tokens=state.tokens + count,
            seconds=self._seconds(),
            skips=state.skips + 1 if is_skipped else 0,
        )
        self._log({"kind": "update", "loss_name": name, "norm": norm, "levels": [asdict(level) for level in totals]})
        self._tell(loss=name, totals=totals)
        if is_skipped:
            self._trainee.check(texts)
            self._note(f"update {self.state.step} is skipped: its gradient is not finite")
            if self.state.skips > MAX_SKIPS:
                raise TrainingError(
                    f"the gradients of {self.state.skips} updates in a row are not finite: lower the learning rate "
                    f"({settings.learning_rate:g}), or train in float32"
                )

    def _gradients(self, texts: Sequence[int], total: float, loss: Loss, levels: int) -> list[StepTotals]:
        """Add the gradients of a batch, in as many parts as memory needs."""
        while True:
            try:
                totals: list[StepTotals] = []
                size = max(1, math.ceil(len(texts) / self.state.splits))
                for start in range(0, len(texts), size):
                    part = texts[start : start + size]
                    sums = self._trainee.gradients(part, total=max(1.0, total), loss=loss, levels=levels)
                    totals += [StepTotals() for _ in sums[len(totals) :]]
                    for level, level_sums in enumerate(sums):
                        totals[level].add(level_sums)
                return totals
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.state.splits >= len(texts):
                    longest = max(self._trainee.lengths[text] for text in texts)
                    raise TrainingError(
                        f"a text of {longest} tokens does not fit in memory: set a maximum length (--max-length), "
                        "fewer levels or a smaller draft vocabulary"
                    ) from error
            self._optimizer.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.state = replace(self.state, splits=2 * self.state.splits)
            self._note(f"out of memory: batches are now computed in {self.state.splits} parts, with the same result")

    def _evaluate(self) -> None:
        evaluation = self._trainee.evaluate(EVALUATED_TEXTS)
        score = evaluation.score
        state = replace(self.state, seconds=self._seconds())
        is_better = score > state.best_score + LEAST_GAIN
        if is_better:
            self.state = replace(state, best_score=score, best_step=state.step, stale=0)
        else:
            self.state = replace(state, stale=state.stale + 1)
        self._log({"kind": "evaluation", "score": score, "modes": evaluation.facts()})
        self._tell(score=score)
        if is_better and self._is_first:
            tensors = self._optimizer.state().items()
            weights = {name: value for name, value in tensors if name.startswith(f"{WEIGHT}/")}
            save_checkpoint(self._folder / BEST, weights, {"step": state.step, "score": score})
        if self._is_stale():
            self._note(f"stopped early: no better score in {self.state.stale} evaluations")

    def _save(self) -> None:
        self._saved_at = self._clock()
        if self._is_first:
            facts = self._same() | {"state": asdict(self.state)}
            save_checkpoint(self._folder / CHECKPOINT, self._optimizer.state(), facts)

    def _tell(
        self, *, loss: str = "", totals: Sequence[StepTotals] = (), score: float | None = None, note: str = ""
    ) -> None:
        if not self._is_first:
            return
        state = self.state
        share = self._progress()
        self._report(
            Progress(
                step=state.step,
                share=share,
                tokens=state.tokens,
                tokens_per_second=state.tokens / state.seconds if state.seconds > 0 else 0.0,
                minutes_left=state.seconds / 60 * (1 - share) / share if share > 0 else None,
                loss=loss,
                losses=tuple(level.loss / max(1, level.count) for level in totals),
                acceptance=tuple(level.accepted / max(1, level.count) for level in totals),
                score=score,
                note=note,
            )
        )

    def _note(self, text: str) -> None:
        self._log({"kind": "note", "text": text})
        self._tell(note=text)

    def _log(self, facts: dict[str, Any]) -> None:
        if self._is_first:
            state = self.state
            line = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3)} | facts
            with (self._folder / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
