"""Distillation of a target into a small whole model with the target's tokens, for drafter `model:FOLDER`.

The student reads the target's own texts; its loss compares both distributions after every token of the answers, with
the target's rows from cached hidden states. Levels of drafts need no unrolling: a model reads tokens only.

Sources: DistillSpec, arXiv 2310.08461; acceptance losses as for heads (`train/losses.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.heads.vocabulary import DraftVocabulary
from draftree.loading.resolve import resolve_model
from draftree.train.batches import Batch
from draftree.train.evaluate import Evaluation
from draftree.train.finishing import finish
from draftree.train.head import HeadResult
from draftree.train.head_trainee import TextTrainee
from draftree.train.loop import TrainingRun
from draftree.train.preparing import Prepared, TrainingJob, prepare
from draftree.train.run_state import Progress
from draftree.train.settings import TrainSettings

__all__ = ["StudentOptions", "train_student"]

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


@dataclass(frozen=True, slots=True)
class StudentOptions:
    """What the student looks like.

    Attributes:
        start: name of a model that training starts from; None for a new one of the sizes below.
        hidden: width.
        layers: number of layers.
        heads: number of attention heads.
        intermediate: inner width of perceptrons; None for 8/3 of the width, rounded up to 32.
    """

    start: str | None = None
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    intermediate: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "intermediate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}: it must be at least 1")
        if self.hidden % (2 * self.heads):
            raise ConfigurationError(
                f"hidden is {self.hidden} and heads is {self.heads}: each head must have an even width, so hidden must "
                "be a multiple of twice the heads"
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
    student = new_student(prepared, settings, options)
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


def new_student(prepared: Prepared, settings: TrainSettings, options: StudentOptions) -> Any:
    """Return the student before training, in the dtype of computation.

    Raises:
        ConfigurationError: a given model has another vocabulary.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = prepared.config
    if options.start is not None:
        student: Any = AutoModelForCausalLM.from_pretrained(
            resolve_model(options.start), dtype=torch.float32, trust_remote_code=False
        )
        require_same_vocabulary(student, options.start, prepared)
        longest = int(getattr(student.config, "max_position_embeddings", 0))
        student.config.max_position_embeddings = max(longest, int(getattr(config, "max_position_embeddings", longest)))
    else:
        torch.manual_seed(settings.seed)
        rope = getattr(config, "rope_parameters", None) or {}
        inner = options.intermediate or 32 * -(-8 * options.hidden // 96)
        student = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=prepared.parts.vocab_size,
                hidden_size=options.hidden,
                num_hidden_layers=options.layers,
                num_attention_heads=options.heads,
                num_key_value_heads=options.heads,
                intermediate_size=inner,
                max_position_embeddings=int(getattr(config, "max_position_embeddings", 2048)),
                rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
                tie_word_embeddings=True,
                bos_token_id=getattr(config, "bos_token_id", None),
                eos_token_id=getattr(config, "eos_token_id", None),
                pad_token_id=getattr(config, "pad_token_id", None),
            )
        )
    return student.to(device=prepared.processes.device, dtype=prepared.dtype)


def require_same_vocabulary(student: Any, name: str, prepared: Prepared) -> None:
    """Check that a given model has the target's vocabulary.

    Raises:
        ConfigurationError: it has another one.
    """
    width, wanted = student.get_output_embeddings().weight.shape[0], prepared.parts.vocab_size
    if width != wanted:
        raise ConfigurationError(
            f"'{name}' has {width} tokens and the target {wanted}: a student needs the target's tokenizer; choose "
            "another model, or leave out --from for a new one"
        )


def copy_tokenizer(prepared: Prepared, output: Path) -> None:
    """Copy the tokenizer's files of the target."""
    folder = prepared.loaded.folder
    assert folder is not None, "checked when its configuration was read"
    for name in TOKENIZER_FILES:
        if (folder / name).is_file() and not (output / name).exists():
            shutil.copyfile(folder / name, output / name)
