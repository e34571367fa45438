"""Training of an EAGLE-3-type head for a target: from data to a folder in the layout of speculators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.heads.base import FeatureHead
from draftree.heads.calibration import write_calibration
from draftree.heads.config import HeadConfig
from draftree.heads.folders import read_head, write_head
from draftree.train.batches import Batch
from draftree.train.confidence import ConfidenceFit
from draftree.train.evaluate import Evaluation
from draftree.train.finishing import earlier_runs, finish
from draftree.train.fresh_head import HeadShape, fresh_head, head_config
from draftree.train.head_trainee import HeadTrainee, TokenWeights
from draftree.train.loop import TrainingRun
from draftree.train.preparing import Prepared, answer_vocabulary, chosen_features, prepare
from draftree.train.preparing import TrainingJob as TrainingJob
from draftree.train.run_state import Progress
from draftree.train.scaling import SIZED_TEXTS, ScaledTexts, fold, sizes_for, unfold
from draftree.train.settings import TrainSettings

__all__ = ["HeadOptions", "HeadResult", "TrainingJob", "train_head"]

DRAFT_VOCAB = 8192
"""Size of the draft vocabulary of a new head, unless the user chooses another."""
LEAST_COVERAGE = 0.97


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options of a new head.

    Attributes:
        shape: sizes and variants.
        draft_vocab: size of the draft vocabulary; None for `DRAFT_VOCAB`.
        features: hidden states that it reads, among those of the data; None for all.
        start: folder of a head that training starts from; None for a new one.
    """

    shape: HeadShape = field(default_factory=HeadShape)
    draft_vocab: int | None = None
    features: tuple[int, ...] | None = None
    start: Path | None = None

    def __post_init__(self) -> None:
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise ConfigurationError(f"draft_vocab is {self.draft_vocab}: it must be at least 1")

    @property
    def new_vocab(self) -> int:
        """Size of a new head's draft vocabulary."""
        return DRAFT_VOCAB if self.draft_vocab is None else self.draft_vocab

    def require_sizes_of_start(self, *, but: str = "") -> None:
        """Raise if sizes or variants are chosen that the head has from which training starts.

        Args:
            but: a size that may be chosen.

        Raises:
            ConfigurationError: at least one is chosen.
        """
        new = HeadShape(trains_output=self.shape.trains_output)
        given = [name for name in ("draft_vocab", "features") if getattr(self, name) is not None]
        given += [one.name for one in fields(new) if getattr(self.shape, one.name) != getattr(new, one.name)]
        if refused := [name for name in given if name != but]:
            raise ConfigurationError(
                f"sizes and variants are those of the head that training starts from: leave out {', '.join(refused)}"
            )


@dataclass(frozen=True, slots=True)
class HeadResult:
    """Result of a training.

    Attributes:
        folder: of the head.
        evaluation: acceptance on all unseen texts.
        notes: lines for the user.
    """

    folder: Path
    evaluation: Evaluation
    notes: tuple[str, ...]


def train_head(
    job: TrainingJob,
    settings: TrainSettings,
    options: HeadOptions,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
    token_weights: TokenWeights | None = None,
    prepared: Prepared | None = None,
    kind: str = "EAGLE-3 head",
    facts: dict[str, Any] | None = None,
) -> HeadResult:
    """Train a head and write its folder.

    Args:
        job: what is read and written.
        settings: settings of the run.
        options: the head.
        report: called with the progress.
        note: called with lines about decisions.
        token_weights: weights of predictions; None for equal ones.
        prepared: inputs that are loaded already; None loads them.
        kind: noun in the card.
        facts: further facts of the recipe.

    Raises:
        ConfigurationError: the inputs do not fit.
        TrainingError: the training failed.
    """
    prepared = prepare(job) if prepared is None else prepared
    head, data = start(prepared, settings, options, note)
    trainee = HeadTrainee(
        head, prepared.parts, data, prepared.seen, prepared.unseen, settings, token_weights=token_weights
    )
    if prepared.processes.count == 1:
        trainee.keep_rows(prepared.data)
    run = TrainingRun(trainee, settings, job.training, prepared.processes, report=report)
    if job.resume:
        run.resume()
        note(f"resumed after {run.state.step} updates")
    note(f"{run.num_weights:,} trained weights, {len(trainee.lengths):,} texts, {str(prepared.dtype)[6:]}")
    state = run.run()
    return (
        _finished(
            prepared, settings, trainee, data.sizes, state, kind, {**(facts or {}), **earlier_runs(options.start)}
        )
        if prepared.processes.index == 0
        else (HeadResult(job.output, Evaluation(), ()))
    )


def start(
    prepared: Prepared, settings: TrainSettings, options: HeadOptions, note: Callable[[str], None]
) -> tuple[FeatureHead, ScaledTexts]:
    """Return the head before training, and the data with the hidden states that it reads."""
    stored = prepared.data.recipe.features
    if options.start is not None:
        options.require_sizes_of_start()
        head = read_head(options.start, dtype=torch.float32)
        if not isinstance(head, FeatureHead):
            raise ConfigurationError(
                f"'{options.start}' has a head of kind '{head.config.kind}', which this command does not train"
            )
        head.bind(prepared.parts)
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(options.shape.trains_output or not name.startswith(("lm_head", "embed_tokens")))
        places = chosen_features(head.config.features, stored, prepared.parts.num_layers)
        data = scaled(prepared, head.config, places)
        unfold(head, data.sizes)
        return _placed(head, prepared), data
    vocabulary, share = answer_vocabulary(prepared, options.new_vocab)
    note(f"draft vocabulary: {len(vocabulary):,} tokens, {100 * share:.2f} % of unseen answers")
    if share < LEAST_COVERAGE:
        note("the draft vocabulary limits acceptance: a larger one (--draft-vocab) covers more")
    places = chosen_features(options.features, stored, prepared.parts.num_layers)
    config = head_config(
        prepared.config,
        prepared.parts,
        [stored[place] for place in places],
        options.shape,
        draft_vocab=len(vocabulary),
        depth=settings.depth,
        name=prepared.loaded.name,
    )
    data = scaled(prepared, config, places)
    head = fresh_head(
        config,
        vocabulary,
        prepared.parts,
        trains_output=options.shape.trains_output,
        seed=settings.seed,
    )
    return _placed(head, prepared), data


def scaled(prepared: Prepared, config: HeadConfig, places: Sequence[int]) -> ScaledTexts:
    """Return the data with the hidden states that a head reads, divided by their sizes."""
    texts = (prepared.data[number] for number in prepared.seen[:SIZED_TEXTS])
    return ScaledTexts(prepared.data, places, sizes_for(config, texts, places))


def _placed(head: FeatureHead, prepared: Prepared) -> FeatureHead:
    device = prepared.processes.device
    head.to(device=device, dtype=prepared.dtype)
    head.vocabulary = head.vocabulary.to(device)
    head.bind(prepared.parts)
    return head


def _finished(
    prepared: Prepared,
    settings: TrainSettings,
    trainee: HeadTrainee,
    sizes: Tensor,
    state: Any,
    kind: str,
    facts: dict[str, Any],
) -> HeadResult:
    """Evaluate, fit the confidence and write all files."""
    fit = ConfidenceFit(settings.depth)

    def watch(batch: Batch, judged: Any) -> None:
        fit.add(batch, judged)

    evaluation = trainee.evaluate(None, watch=watch)
    output = prepared.job.output
    fold(trainee.head, sizes)
    write_head(trainee.head.to(prepared.loaded.model.dtype), output)
    calibration = fit.fit()
    write_calibration(calibration, output)
    more = {"head": {"config": asdict(trainee.head.config)}, "confidence": fit.report(calibration)} | facts
    notes = finish(prepared, settings, state, evaluation, kind=kind, usage=f"head:{output}", more=json_ready(more))
    return HeadResult(output, evaluation, tuple(notes))


def json_ready(value: Any) -> Any:
    """Return a value with mappings and sequences as dictionaries and lists."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): json_ready(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(one) for one in value]
    return str(value) if isinstance(value, Path) else value
