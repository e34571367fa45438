"""Distillation of a target into a small whole model with the target's tokens, for drafter `model:FOLDER`.

The student reads the target's own texts; its loss compares both distributions after every token of the answers, with
the target's rows from cached hidden states. Levels of drafts need no unrolling: a model reads tokens only.

Sources: DistillSpec, arXiv 2310.08461; acceptance losses as for heads (`train/losses.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import Batch
from draftree.train.evaluate import Evaluation
from draftree.train.finishing import finish
from draftree.train.head import HeadResult
from draftree.train.head_trainee import TextTrainee
from draftree.train.loop import TrainingRun
from draftree.train.preparing import Prepared, TrainingJob, prepare
from draftree.train.run_state import Progress
from draftree.train.settings import TrainSettings
from draftree.train.student import StudentOptions, new_student

__all__ = ["train_student"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class StudentTrainee(TextTrainee):
    """A transformers model in training; its logits after a token do not depend on the level.

    Args:
        student: the model.
        arguments: of `TextTrainee`, after the module.
        more: further arguments of `TextTrainee`.
    """

    def __init__(self, student: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(student, *arguments, **more)
        self._student = student

    def states_of(self, batch: Batch, levels: int) -> Iterator[Tensor]:
        """Yield the states after each chain's token and, for later levels, after the tokens that follow it."""
        states = self._states(batch)
        yield states
        for level in range(1, levels):
            yield states[batch.step_chains(level)]

    def _states(self, batch: Batch) -> Tensor:
        rows = batch.rows
        tokens = torch.zeros(rows.num_texts, rows.longest + 1, dtype=torch.int64, device=batch.tokens.device)
        tokens[:, 0] = torch.stack([text.tokens[0] for text in batch.texts])
        tokens[:, 1:] = rows.padded(batch.tokens)
        # padding is at the end, where causal rows of the text do not look
        hidden = self._student.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        places = rows.places[batch.chains]
        found: Tensor = hidden.flatten(0, 1)[places + places // rows.longest + 1]
        return found

    def logits_of(self, batch: Batch, level: int, chains: Tensor, states: Tensor) -> Tensor:
        """Return the student's logits."""
        found: Tensor = self._student.get_output_embeddings()(states).float()
        return found


def train_student(
    job: TrainingJob,
    settings: TrainSettings,
    options: StudentOptions,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> HeadResult:
    """Train a student and write its folder, a plain transformers folder with the target's tokenizer.

    Args:
        job: what is read and written.
        settings: settings of the run; only the first level is trained.
        options: the student.
        report: called with the progress.
        note: called with lines about decisions.

    Raises:
        ConfigurationError: the inputs do not fit.
        TrainingError: the training failed.
    """
    if settings.levels != 1:
        raise ConfigurationError(f"levels is {settings.levels}: a whole model has no states of its own to read; set 1")
    prepared = prepare(job)
    student = new_student(prepared, settings, options, note=note)
    vocabulary = DraftVocabulary.full(prepared.parts.vocab_size).to(prepared.processes.device)
    trainee = StudentTrainee(
        student, vocabulary, prepared.parts, prepared.data, prepared.seen, prepared.unseen, settings
    )
    if prepared.processes.count == 1:
        trainee.keep_rows(prepared.data)
    run = TrainingRun(trainee, settings, job.training, prepared.processes, report=report)
    if job.resume:
        run.resume()
        note(f"resumed after {run.state.step} updates")
    note(f"{run.num_weights:,} trained weights, {len(trainee.lengths):,} texts, {str(prepared.dtype)[6:]}")
    state = run.run()
    if prepared.processes.index:
        return HeadResult(job.output, Evaluation(), ())
    evaluation = trainee.evaluate(None)
    student.to(prepared.loaded.model.dtype).save_pretrained(job.output)
    copy_tokenizer(prepared, job.output)
    notes = finish(
        prepared,
        settings,
        state,
        evaluation,
        kind="Distilled drafter",
        usage=f"model:{job.output}",
        more={"student": {"start": options.start, "config": student.config.to_diff_dict()}},
    )
    return HeadResult(job.output, evaluation, tuple(notes))


def copy_tokenizer(prepared: Prepared, output: Path) -> None:
    """Copy the tokenizer's files of the target."""
    folder = prepared.loaded.folder
    assert folder is not None, "checked when its configuration was read"
    for name in TOKENIZER_FILES:
        if (folder / name).is_file() and not (output / name).exists():
            shutil.copyfile(folder / name, output / name)
