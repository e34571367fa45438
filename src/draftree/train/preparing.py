"""Preparation of every training: the data, the target's parts, and a folder for the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.build import require_positive
from draftree.core.errors import ConfigurationError, import_extra
from draftree.core.host import apply_threads
from draftree.heads.base import TargetParts
from draftree.heads.vocabulary import DraftVocabulary
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.options import resolve_device, resolve_dtype
from draftree.options import QUANTIZATIONS, ModelOptions
from draftree.train.checkpoints import CHECKPOINT
from draftree.train.data.shards import UNSEEN_SHARE, TrainingData
from draftree.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Progress:
    """Report of an update or an evaluation."""

    step: int
    share: float  # used share of the budget
    tokens: int
    tokens_per_second: float
    minutes_left: float | None  # estimate; None before the first update
    loss: str = ""
    losses: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()  # mean of sum min(p, q) by level
    score: float | None = None  # score of the evaluation; None for an update
    note: str = ""  # one line about an event; empty if there is none


Report = Callable[[Progress], None]
Note = Callable[[str], None]  # takes a line for the user


def ignore(event: object) -> None:
    """Report or note nothing."""


class Processes:
    """The processes that train one drafter together: those of an accelerator, or this one alone.

    Each reads its part of every batch; gradients are summed.
    """

    def __init__(self, device: torch.device, accelerator: Any = None) -> None:
        self._accelerator = accelerator
        self.index: int = 0 if accelerator is None else accelerator.process_index
        self.count: int = 1 if accelerator is None else accelerator.num_processes
        self.device: torch.device = device if accelerator is None else accelerator.device

    def total(self, value: Tensor) -> Tensor:
        if self._accelerator is None:
            return value
        return self._accelerator.reduce(value, reduction="sum")

    def wait(self) -> None:
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()


def find_processes(device: torch.device) -> Processes:
    """Return the processes of this run: those of `accelerate launch`, which places them, or this one alone.

    Several processes use the processor if `device` is the processor.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(device)
    accelerate = import_extra("train", "several processes need", error=ConfigurationError)
    return Processes(device, accelerate.Accelerator(cpu=device.type == "cpu"))


TRAINING = "training"  # folder of checkpoints, log and plots in the folder of the result


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Names of what is read and written."""

    options: ModelOptions  # the target; dtype and device of computation, a run in one process
    data: tuple[Path, ...]
    output: Path
    resume: bool = False  # whether to continue the run in the output folder
    unseen_share: float = UNSEEN_SHARE  # share of the prompts that are not trained on
    # least number of tokens of the texts of training that are used, the first ones; None for all
    data_tokens: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "data_tokens")

    @property
    def training(self) -> Path:
        """Folder of checkpoints, log and plots."""
        return self.output / TRAINING


@dataclass(frozen=True, slots=True)
class Prepared:
    job: TrainingJob
    data: TrainingData
    seen: list[int]  # numbers of texts of training
    unseen: list[int]  # numbers of texts of evaluations
    loaded: LoadedModel
    config: Any
    parts: TargetParts  # parts of the target, in the dtype and on the device of computation
    processes: Processes
    dtype: torch.dtype
    settings: TrainSettings
    report: Report
    note: Note


def prepare(job: TrainingJob, settings: TrainSettings, report: Report = ignore, note: Note = ignore) -> Prepared:
    """Load data and target; nothing is overwritten."""
    has_run = (job.training / CHECKPOINT).is_file()
    output = job.output
    if job.resume and not has_run:
        raise ConfigurationError(f"'{output}' has no run to resume: leave out --resume, or name its folder")
    if not job.resume and has_run:
        raise ConfigurationError(f"'{output}' already has a run: give --resume to continue it, or another folder")
    if not has_run and output.exists() and (not output.is_dir() or any(map(Path.is_file, output.rglob("*")))):
        raise ConfigurationError(f"'{output}' already exists, and files are never overwritten: choose another path")
    options = job.options
    apply_threads(options.threads)
    processes = find_processes(resolve_device(options.device))
    device = processes.device
    dtype = resolve_dtype(options.dtype, device)
    data = TrainingData(*job.data)
    loaded = load_model(
        options,
        dtype=data.recipe.dtype,
        device=str(device),
        kernels="torch" if data.recipe.quantization is None else "auto",
        quantization=data.recipe.quantization if data.recipe.quantization in QUANTIZATIONS else None,
    )
    if data.recipe.fingerprint != loaded.model.fingerprint:
        raise ConfigurationError(
            f"'{data.folders[0].path}' was made with other weights ('{data.recipe.target}'): choose that model, or "
            f"make data for '{loaded.name}' with 'draftree train data'"
        )
    seen, unseen = data.split(job.unseen_share)
    if not seen or not unseen:
        raise ConfigurationError(
            f"the data has {len(seen)} texts for training and {len(unseen)} unseen ones: make more data, or set "
            "another --unseen-share"
        )
    seen = first_texts(data, seen, job.data_tokens)
    config = text_config(loaded)
    parts = TargetParts.of(loaded.model)
    parts = replace(parts, embedding=parts.embedding.to(dtype), output=parts.output.to(dtype))
    return Prepared(job, data, seen, unseen, loaded, config, parts, processes, dtype, settings, report, note)


def text_config(loaded: LoadedModel) -> Any:
    """Return the configuration of transformers of a loaded model's decoder."""
    from transformers import AutoConfig

    if loaded.folder is None:
        raise ConfigurationError(f"'{loaded.name}' has no folder with a configuration: choose a model in a folder")
    return AutoConfig.from_pretrained(loaded.folder, trust_remote_code=False).get_text_config()


def first_texts(data: TrainingData, numbers: Sequence[int], tokens: int | None) -> list[int]:
    """Return the first texts that have so many tokens together, prompts included; None for all texts."""
    if tokens is None:
        return list(numbers)
    total = 0
    for place, number in enumerate(numbers, 1):
        total += data[number].num_rows
        if total >= tokens:
            return list(numbers[:place])
    raise ConfigurationError(
        f"data_tokens is {tokens:,} and the texts of training have {total:,} tokens: leave --data-tokens out to use "
        "all of them, or make more data with 'draftree train data'"
    )


def answer_vocabulary(prepared: Prepared, size: int) -> tuple[DraftVocabulary, float]:
    """Return the most frequent tokens of the answers of training, and their share of unseen answers."""
    vocab = prepared.parts.vocab_size
    if size >= vocab:
        return DraftVocabulary.full(vocab), 1.0
    always = [token for token in prepared.loaded.eos_ids if token < vocab]
    vocabulary = DraftVocabulary.from_counts(prepared.data.counts(prepared.seen), size, always=always, vocab_size=vocab)
    unseen = prepared.data.counts(prepared.unseen)
    covered = int(unseen[vocabulary.ids[vocabulary.ids < len(unseen)]].sum())
    return vocabulary, covered / int(unseen.sum()) if unseen.any() else 1.0


def chosen_features(layers: Sequence[int] | None, stored: Sequence[int], num_layers: int) -> list[int]:
    """Return the places of layers among the stored ones; all of them for None."""
    if layers is None:
        return list(range(len(stored)))
    normal = {-1: num_layers}
    known = {normal.get(layer, layer): place for place, layer in enumerate(stored)}
    for layer in layers:
        if normal.get(layer, layer) not in known:
            raise ConfigurationError(
                f"the data has no hidden states of layer {layer}: it has {', '.join(map(str, stored))}; choose among "
                "those, or make data with --features"
            )
    return [known[normal.get(layer, layer)] for layer in layers]
