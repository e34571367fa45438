"""`draftree train`: training data of a target, and drafters trained on them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from draftree.cli.layout import PlainCommand, PlainGroup
from draftree.cli.options import Device, Model, Threads, TrustRemoteCode, takes
from draftree.cli.render import note, say
from draftree.cli.train_data import data, prompts
from draftree.core.errors import ConfigurationError, suggestion

if TYPE_CHECKING:
    from draftree.train.evaluate import Evaluation
    from draftree.train.head import HeadOptions, HeadResult
    from draftree.train.loop import Progress
    from draftree.train.preparing import TrainingJob
    from draftree.train.settings import TrainSettings

FILES, BUDGET, RECIPE, EVALUATION = "Files", "Budget", "Recipe", "Evaluation"

Data = Annotated[
    list[Path],
    typer.Option(
        help="Folder of 'draftree train data'; repeatable for data of one target.",
        metavar="FOLDER",
        rich_help_panel=FILES,
    ),
]
Output = Annotated[Path, typer.Option(help="New folder of the result.", metavar="FOLDER", rich_help_panel=FILES)]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.", rich_help_panel=FILES)]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Minutes of training; 60 if neither --steps nor --tokens is given.", metavar="X", rich_help_panel=BUDGET
    ),
]
Steps = Annotated[int | None, typer.Option(help="Maximum number of updates.", metavar="N", rich_help_panel=BUDGET)]
Tokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of trained predictions, repeated ones included.", metavar="N", rich_help_panel=BUDGET
    ),
]
Loss = Annotated[
    str,
    typer.Option(
        help="Loss of the later part: coupled, coupled_miss, lk, lk_hybrid, tv, kl, reverse_kl or cross_entropy.",
        metavar="NAME",
        rich_help_panel=RECIPE,
    ),
]
FirstLoss = Annotated[str, typer.Option(help="Loss of the first part.", metavar="NAME", rich_help_panel=RECIPE)]
FirstShare = Annotated[
    float, typer.Option(help="Share of the budget of the first part.", metavar="X", rich_help_panel=RECIPE)
]
Temperature = Annotated[
    float,
    typer.Option(help="Temperature at which target and drafter are compared.", metavar="X", rich_help_panel=RECIPE),
]
Levels = Annotated[
    int, typer.Option(help="Levels of training on the drafter's own states.", metavar="N", rich_help_panel=RECIPE)
]
LevelsFrom = Annotated[
    float,
    typer.Option(help="Share of the budget that trains the first level only.", metavar="X", rich_help_panel=RECIPE),
]
Decay = Annotated[
    float | None,
    typer.Option(
        "--level-decay",
        help="Weight of each level relative to the one before; by survival of the drafts if not given.",
        metavar="X",
        rich_help_panel=RECIPE,
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        help="muon (matrices of layers; adamw for the rest) or adamw.", metavar="NAME", rich_help_panel=RECIPE
    ),
]
LearningRate = Annotated[float, typer.Option(help="Highest learning rate.", metavar="X", rich_help_panel=RECIPE)]
WarmUp = Annotated[
    int, typer.Option(help="Updates until the highest learning rate.", metavar="N", rich_help_panel=RECIPE)
]
BatchTokens = Annotated[int, typer.Option(help="Tokens of a batch.", metavar="N", rich_help_panel=RECIPE)]
MaxLength = Annotated[
    int | None, typer.Option(help="Cut longer texts; no limit if not given.", metavar="N", rich_help_panel=RECIPE)
]
Seed = Annotated[
    int, typer.Option(help="Seed of first weights and of the order of texts.", metavar="N", rich_help_panel=RECIPE)
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of computation: auto, float32 or bfloat16; weights are updated in float32.",
        metavar="NAME",
        rich_help_panel="Execution",
    ),
]
Depth = Annotated[
    int,
    typer.Option(
        help="Levels of drafts in evaluations, and by default later.", metavar="N", rich_help_panel=EVALUATION
    ),
]
EvaluateEvery = Annotated[
    int,
    typer.Option(help="Updates between evaluations on unseen texts.", metavar="N", rich_help_panel=EVALUATION),
]
Patience = Annotated[
    int,
    typer.Option(
        help="End after so many evaluations without a better acceptance length; 0 for no early end.",
        metavar="N",
        rich_help_panel=EVALUATION,
    ),
]
DataTokens = Annotated[
    int | None,
    typer.Option(
        help="Train on the first texts with so many tokens only, prompts included; on all texts if not given.",
        metavar="N",
        rich_help_panel=FILES,
    ),
]
UnseenShare = Annotated[
    float,
    typer.Option(help="Share of the prompts that are kept for evaluations.", metavar="X", rich_help_panel=EVALUATION),
]


LINE_SECONDS = 60.0
INTERRUPTED = 130
CLEAR = "\r\x1b[K"


def line_of(progress: Progress) -> str:
    """Return the line of an update: share of the budget, loss, acceptance by level, speed, time left."""
    losses = " ".join(f"{value:.3f}" for value in progress.losses)
    rates = " ".join(f"{value:.2f}" for value in progress.acceptance)
    left = "" if progress.minutes_left is None else f", {progress.minutes_left:.1f} min left"
    return (
        f"{100 * progress.share:.0f} % update {progress.step}: {progress.loss} {losses}, overlap {rates}, "
        f"{progress.tokens_per_second:,.0f} tokens/s{left}"
    )


class Lines:
    """Shows progress on standard error."""

    def __init__(self) -> None:
        self._shown = float("-inf")
        self._replaces = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        """Show an update, an evaluation or a note."""
        if progress.note:
            self._line(progress.note)
        elif progress.score is not None:
            self._line(f"update {progress.step}: acceptance length {progress.score:.3f} on unseen texts")
        elif self._replaces:
            sys.stderr.write(CLEAR + line_of(progress))
            sys.stderr.flush()
        elif time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            note(line_of(progress))

    def _line(self, text: str) -> None:
        if self._replaces:
            sys.stderr.write(CLEAR)
        note(text)


@contextmanager
def stopping() -> Iterator[None]:
    """Report Ctrl-C: the last checkpoint stays."""
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted: the last checkpoint is kept; the same command with --resume continues")
        raise typer.Exit(INTERRUPTED) from None


def say_result(evaluation: Evaluation) -> None:
    """Print acceptance by depth, for each temperature of the texts."""
    for temperature, mode in evaluation.facts().items():
        rounds = mode["rounds"]["all"]
        rates = " ".join(f"{value:.3f}" for value in rounds["conditional"])
        say(
            f"temperature {temperature}: {rounds['acceptance_length']:.3f} tokens per round "
            f"in {rounds['drafts']:,} drafts; "
            f"accepted by depth {rates}; the draft vocabulary has {100 * mode['coverage']:.1f} % of the picks\n"
        )


T = TypeVar("T")
HEAD = "Head"
DEFAULT_MINUTES = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """One training: the model, the data and the settings."""

    job: TrainingJob
    settings: TrainSettings


def run_of(
    model: Model,
    *,
    data: Data,
    data_tokens: DataTokens = None,
    output: Output,
    resume: Resume = False,
    minutes: Minutes = None,
    steps: Steps = None,
    tokens: Tokens = None,
    loss: Loss = "coupled",
    first_loss: FirstLoss = "kl",
    first_share: FirstShare = 0.5,
    temperature: Temperature = 0.8,
    levels: Levels = 3,
    levels_from: LevelsFrom = 0.4,
    level_decay: Decay = None,
    optimizer: Optimizer = "muon",
    learning_rate: LearningRate = 2e-3,
    warm_up: WarmUp = 50,
    batch_tokens: BatchTokens = 6144,
    max_length: MaxLength = None,
    seed: Seed = 0,
    depth: Depth = 4,
    evaluate_every: EvaluateEvery = 50,
    patience: Patience = 8,
    unseen_share: UnseenShare = 0.05,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> Run:
    """Return the run of the options."""
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
            "--from", help="Start from this head; a new one if not given.", metavar="FOLDER", rich_help_panel=FILES
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
    """Return what the head of the options looks like."""
    from draftree.train.head import HeadOptions, HeadShape

    shape = HeadShape(layers, intermediate, fc_norm, norm_output, train_output)
    return HeadOptions(shape, draft_vocab, layers_of(features), start)


LEAST_TOKENS = 1.1
"""Tokens per round below which a head is a loss even if it and the wider pass cost a tenth of a plain pass."""
COVERED = 0.9
"""Share of tokens in the draft vocabulary above which a larger one gains little."""


def layers_of(text: str | None) -> tuple[int, ...] | None:
    """Return the layers of an option."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"features is {text!r}: give layers such as 2,15,27") from None


def run_training(run: Run, work: Callable[[], T]) -> T:
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
    from draftree.loading.auto_draft import TrainedHead, keep_trained
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


@takes("run", run_of)
@takes("chosen", head_of)
def head(*, run: Run, chosen: HeadOptions) -> None:
    """Train an EAGLE-3-type head on the target's own texts; 'draftree generate MODEL --draft head:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues. Several processes: 'accelerate launch -m draftree train
    head ...'.
    """
    from draftree.train.head import train_head

    result = run_training(run, lambda: train_head(run.job, run.settings, chosen, report=Lines(), note=note))
    say_head(run, result)


OF_UNROLLS = {"levels": 1, "levels_from": 0.0}
"""Options of multi-step training: a block has all its levels in one pass, and all are trained."""
OF_EAGLE = {"fc_norm": False, "norm_output": False}


@takes("run", run_of, fixed=OF_UNROLLS)
@takes("chosen", head_of, fixed=OF_EAGLE, layers=2)
def block(
    *,
    run: Run,
    chosen: HeadOptions,
    markov_rank: Annotated[
        int | None,
        typer.Option(
            help="Rank of the bias by the token before, 0 for none; 64 for a new head if not given.",
            metavar="N",
            rich_help_panel=HEAD,
        ),
    ] = None,
) -> None:
    """Train a DSpark-type head, whose blocks have as many tokens as --depth; '--draft head:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues.
    """
    from draftree.train.block import BlockOptions, train_block

    options = BlockOptions(chosen, markov_rank)
    settings = dataclasses.replace(run.settings, levels=run.settings.depth)
    result = run_training(run, lambda: train_block(run.job, settings, options, report=Lines(), note=note))
    say_head(run, result)


BOOSTING = "Boosting"


@takes("run", run_of)
@takes("chosen", head_of)
def boost(
    *,
    run: Run,
    earlier: Annotated[
        list[Path],
        typer.Option(
            help="Folder of an earlier head; repeatable, the best one first.",
            metavar="FOLDER",
            rich_help_panel=BOOSTING,
        ),
    ],
    strength: Annotated[
        float,
        typer.Option(
            help="Exponent of the probability that earlier heads miss.", metavar="X", rich_help_panel=BOOSTING
        ),
    ] = 1.0,
    floor: Annotated[
        float, typer.Option(help="Least weight of a prediction.", metavar="X", rich_help_panel=BOOSTING)
    ] = 0.05,
    chosen: HeadOptions,
) -> None:
    """Train a second head on what the first misses, and compare both with the best two tokens of the first.

    'draftree generate MODEL --draft head:FIRST+head:SECOND' merges their drafts. Ctrl-C keeps the last checkpoint.
    """
    from draftree.train.boost import Boosting, train_boosted

    boosting = Boosting(tuple(earlier), strength, floor)
    result, union = run_training(
        run, lambda: train_boosted(run.job, run.settings, chosen, boosting, report=Lines(), note=note)
    )
    say_trained(result)
    for kind, rows in union.items():
        lengths = ", ".join(f"{name} {row['acceptance_length']:.3f}" for name, row in rows.items())
        say(f"temperature {kind}, tokens per round: {lengths}\n")
    say_use(run, result.folder, "+".join(f"head:{folder}" for folder in (*earlier, result.folder)))


STUDENT = "Student"
OF_HEADS = {"levels": 1, "levels_from": 0.5, "level_decay": None}


@takes("run", run_of, fixed=OF_HEADS, learning_rate=6e-4, batch_tokens=1024)
def distill(
    *,
    run: Run,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start from this model; other tokens become the target's. A new one if not given.",
            metavar="MODEL",
            rich_help_panel=STUDENT,
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Width of a new one.", metavar="N", rich_help_panel=STUDENT)] = 256,
    layers: Annotated[int, typer.Option(help="Layers of a new one.", metavar="N", rich_help_panel=STUDENT)] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads of a new one.", metavar="N", rich_help_panel=STUDENT)] = 4,
    intermediate: Annotated[
        int | None,
        typer.Option(
            help="Inner width of its perceptrons; 8/3 of the width if not given.", metavar="N", rich_help_panel=STUDENT
        ),
    ] = None,
    kept_layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of the given model that stay, evenly spaced; all if not given.",
            metavar="N",
            rich_help_panel=STUDENT,
        ),
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay of matrices.", metavar="X", rich_help_panel=RECIPE)
    ] = 0.1,
) -> None:
    """Train a small model on the target's own texts; 'draftree generate MODEL --draft model:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues.
    """
    from draftree.train.distill import StudentOptions, train_student

    chosen = StudentOptions(start, hidden, layers, heads, intermediate, kept_layers)
    settings = dataclasses.replace(run.settings, weight_decay=weight_decay)
    result = run_training(run, lambda: train_student(run.job, settings, chosen, report=Lines(), note=note))
    say_trained(result)
    say_use(run, result.folder, f"model:{result.folder}")


PACKAGE = "package"
SERVERS = ("speculators", "sglang", PACKAGE)
"""Values of `--to`: the layout of speculators for vLLM, folders for SGLang, and heads of this package."""


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a head, or of a small whole model.", metavar="FOLDER")],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="speculators (for vLLM), sglang, or package: the small folder in which this package ships a head.",
            metavar="|".join(SERVERS),
            show_default=False,
        ),
    ],
    target: Annotated[
        str,
        typer.Option(help="The target: a name of 'draftree models', a folder or a hub id.", metavar="MODEL"),
    ],
    output: Annotated[Path, typer.Option(help="New folder.", metavar="FOLDER")],
    served_as: Annotated[
        str | None,
        typer.Option(
            help="Name of the target in the files, such as a hub id; its folder if not given.", metavar="NAME"
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            help="With --to package: licence of the weights; the target's in 'draftree models' if not given.",
            metavar="NAME",
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="With --to package: store matrices in 8 bits.")] = False,
) -> None:
    """Write a drafter for vLLM or SGLang and print how to serve it, or write the folder of a head of this package."""
    if to not in SERVERS:
        raise ConfigurationError(f"option --to is '{to}': {suggestion(to, SERVERS)}")
    if to == PACKAGE:
        if served_as is not None:
            raise typer.BadParameter("--to package names the target by itself: leave it out", param_hint="--served-as")
        from draftree.train.export import ship_head

        say(
            "".join(f"{line}\n" for line in ship_head(folder, target=target, output=output, licence=licence, int8=int8))
        )
        return
    if licence is not None or int8:
        option = "--int8" if licence is None else "--licence"
        raise typer.BadParameter("only --to package takes it: leave it out", param_hint=option)
    from draftree.train.export import export_drafter

    lines = export_drafter(folder, to=to, target=target, output=output, served_as=served_as)
    note(f"wrote {output}; serve it with:")
    say("".join(f"{line}\n" for line in lines))


train = typer.Typer(cls=PlainGroup, no_args_is_help=True)


@train.callback()
def about() -> None:
    """Make training data from a target's own texts, and train drafters on them."""


for _name, _command in (
    ("prompts", prompts),
    ("data", data),
    ("head", head),
    ("block", block),
    ("distill", distill),
    ("boost", boost),
    ("export", export),
):
    train.command(_name, cls=PlainCommand)(_command)
