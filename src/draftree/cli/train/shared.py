"""Common parts of the trainings: the options of a run and of a head, and the report at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from draftree.cli.render import note, say
from draftree.cli.train import options as o
from draftree.cli.train.showing import say_result, stopping
from draftree.core.errors import ConfigurationError

if TYPE_CHECKING:
    from draftree.train.head import HeadOptions, HeadResult
    from draftree.train.preparing import TrainingJob
    from draftree.train.settings import TrainSettings

__all__ = ["Run", "budget_line", "head_of", "layers_of", "run_of", "say_trained", "say_use", "train"]

T = TypeVar("T")
HEAD = "Head"
DEFAULT_MINUTES = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """One training: the model, the data and the settings."""

    job: TrainingJob
    settings: TrainSettings


def run_of(
    model: o.Model,
    *,
    data: o.Data,
    data_tokens: o.DataTokens = None,
    output: o.Output,
    resume: o.Resume = False,
    minutes: o.Minutes = None,
    steps: o.Steps = None,
    tokens: o.Tokens = None,
    loss: o.Loss = "coupled",
    first_loss: o.FirstLoss = "kl",
    first_share: o.FirstShare = 0.5,
    temperature: o.Temperature = 0.8,
    levels: o.Levels = 3,
    levels_from: o.LevelsFrom = 0.4,
    level_decay: o.Decay = None,
    optimizer: o.Optimizer = "muon",
    learning_rate: o.LearningRate = 2e-3,
    warm_up: o.WarmUp = 50,
    batch_tokens: o.BatchTokens = 6144,
    max_length: o.MaxLength = None,
    seed: o.Seed = 0,
    depth: o.Depth = 4,
    evaluate_every: o.EvaluateEvery = 50,
    patience: o.Patience = 8,
    unseen_share: o.UnseenShare = 0.05,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    threads: o.Threads = None,
    trust_remote_code: o.TrustRemoteCode = False,
) -> Run:
    """Return the run of the options.

    Raises:
        ConfigurationError: a value is out of range.
    """
    from draftree.train.preparing import TrainingJob
    from draftree.train.settings import Limits, TrainSettings
    from draftree.train.unroll import StepWeights

    if patience < 0:
        raise ConfigurationError(f"patience is {patience}: it must not be negative")
    has_limit = any(value is not None for value in (minutes, steps, tokens))
    settings = TrainSettings(
        limits=Limits(steps, tokens, minutes if has_limit else DEFAULT_MINUTES),
        weights=StepWeights(level_decay),
        patience=patience or None,
        loss=loss,
        first_loss=first_loss,
        first_share=first_share,
        temperature=temperature,
        levels=levels,
        levels_from=levels_from,
        optimizer=optimizer,
        learning_rate=learning_rate,
        warm_up=warm_up,
        batch_tokens=batch_tokens,
        max_length=max_length,
        seed=seed,
        depth=depth,
        evaluate_every=evaluate_every,
        dtype=dtype,
    )
    job = TrainingJob(
        model=model,
        data=tuple(data),
        output=output,
        resume=resume,
        dtype=dtype,
        device=device,
        threads=threads,
        unseen_share=unseen_share,
        data_tokens=data_tokens,
        trust_remote_code=trust_remote_code,
    )
    return Run(job, settings)


def head_of(
    *,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Start from this head; a new one if not given.", metavar="FOLDER", rich_help_panel=o.FILES
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Tokens that it can propose, by counts in the answers; 8192 if not given.",
            metavar="N",
            rich_help_panel=HEAD,
        ),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="Layers that it reads, such as 2,15,27; all of the data if not given.",
            metavar="LAYERS",
            rich_help_panel=HEAD,
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Decoder layers.", metavar="N", rich_help_panel=HEAD)] = 1,
    intermediate: Annotated[
        int | None,
        typer.Option(
            help="Inner width of the perceptron; the target's if not given.", metavar="N", rich_help_panel=HEAD
        ),
    ] = None,
    fc_norm: Annotated[
        bool, typer.Option("--fc-norm", help="A norm for each hidden state (EAGLE-3.1).", rich_help_panel=HEAD)
    ] = False,
    norm_output: Annotated[
        bool, typer.Option("--norm-output", help="Recycle states after the norm (EAGLE-3.1).", rich_help_panel=HEAD)
    ] = False,
    train_output: Annotated[
        bool,
        typer.Option(
            "--train-output",
            help="Train the output head too; it stays the target's if not given.",
            rich_help_panel=HEAD,
        ),
    ] = False,
) -> HeadOptions:
    """Return what the head of the options looks like.

    Raises:
        ConfigurationError: a value is out of range.
        typer.BadParameter: the layers are no integers.
    """
    from draftree.train.fresh_head import HeadShape
    from draftree.train.head import HeadOptions

    shape = HeadShape(layers, intermediate, fc_norm, norm_output, train_output)
    return HeadOptions(shape, draft_vocab, layers_of(features), start)


LEAST_TOKENS = 1.1
"""Tokens per round below which a head is a loss even if it and the wider pass cost a tenth of a plain pass."""
COVERED = 0.9
"""Share of tokens in the draft vocabulary above which a larger one gains little."""


def layers_of(text: str | None) -> tuple[int, ...] | None:
    """Return the layers of an option.

    Raises:
        typer.BadParameter: they are no integers.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"features is {text!r}: give layers such as 2,15,27") from None


def train(run: Run, work: Callable[[], T]) -> T:
    """Print the budget and train; Ctrl-C ends the program with the last checkpoint kept."""
    note(budget_line(run.settings))
    with stopping():
        return work()


def say_trained(result: HeadResult) -> None:
    """Print the notes and the acceptance of a result."""
    for line in result.notes:
        note(line)
    say_result(result.evaluation)


def say_head(run: Run, result: HeadResult) -> None:
    """Print the acceptance of a head, whether it pays, and its command; `auto` uses one that pays from now on."""
    say_trained(result)
    # processes other than the first evaluate nothing, and without unseen texts nothing is known
    if result.evaluation.modes:
        say_worth(result)
    say_use(run, result.folder, f"head:{result.folder}")


def say_worth(result: HeadResult) -> None:
    """Print whether a head pays; remember one that does for `auto`."""
    from draftree.core.files import read_json
    from draftree.loading.trained import TrainedHead, keep_trained
    from draftree.train.finishing import RECIPE

    modes = result.evaluation.facts().values()
    tokens = max(float(mode["rounds"]["all"]["acceptance_length"]) for mode in modes)
    if tokens >= LEAST_TOKENS:
        fingerprint = str(read_json(result.folder / RECIPE)["fingerprint"])
        if keep_trained(fingerprint, TrainedHead(str(result.folder.resolve()), tokens)) is not None:
            say("--draft auto uses it, unless 'draftree tune' kept a faster one; it must stay in its folder\n")
        return
    coverage = min(float(mode["coverage"]) for mode in modes)
    more = "" if coverage > COVERED else f", and raise --draft-vocab, which has {100 * coverage:.0f} % of the tokens"
    say(
        f"this head does not pay: {tokens:.3f} tokens per round, and plain decoding has 1 without its cost; train "
        f"longer (--minutes, --steps) or on more texts ('draftree train data --prompts'){more}\n"
    )


def say_use(run: Run, folder: Path, draft: str) -> None:
    """Print the command that uses a result."""
    say(f"{folder}: draftree generate {run.job.model} --draft {draft}\n")


def budget_line(settings: TrainSettings) -> str:
    """Return the budget in words."""
    limits = settings.limits
    named = ((limits.minutes, "minutes"), (limits.steps, "updates"), (limits.tokens, "predictions"))
    parts = [f"{value:,g} {unit}" if unit == "minutes" else f"{value:,} {unit}" for value, unit in named if value]
    line = f"training for up to {' or '.join(parts)}"
    if settings.patience is None:
        return line
    return f"{line}; it ends earlier if the acceptance stops rising (--patience)"
