"""`draftree train`: training data of a target, and drafters trained on them."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from draftree.cli.bench import listed
from draftree.cli.layout import argument, group_of, option, refuse
from draftree.cli.options import EXECUTION_OPTIONS, Setup, takes, takes_setup, values_of
from draftree.cli.render import CLEAR_LINE, INTERRUPTED, is_terminal, note, resolve_with_bar, say, write
from draftree.cli.train_data import PROMPTS, data, prepare, prompt_sets, prompts, run
from draftree.cli.tune import announce, conclude, measure, say_differences, table
from draftree.core.errors import ConfigurationError, DraftreeError, suggestion
from draftree.core.files import PathLock
from draftree.loading.resolve import require_sound
from draftree.options import EXECUTION

if TYPE_CHECKING:
    from draftree.loading.loaded import LoadedModel
    from draftree.train.automatic import TrainingPlan
    from draftree.train.data.capture import Capture, CaptureSettings
    from draftree.train.data.prompts import PromptSet
    from draftree.train.evaluate import Evaluation
    from draftree.train.finishing import TrainingResult
    from draftree.train.head import HeadOptions
    from draftree.train.preparing import Progress, TrainingJob
    from draftree.train.settings import TrainSettings

FILES, BUDGET, RECIPE, EVALUATION = "Files", "Budget", "Recipe", "Evaluation"


LINE_SECONDS = 60.0


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
    """Shows progress in the last line of a terminal; elsewhere as a line each minute."""

    def __init__(self) -> None:
        self._shown = float("-inf")

    def __call__(self, progress: Progress) -> None:
        replaces = is_terminal(sys.stderr)
        text = progress.note
        if not text and progress.score is not None:
            text = f"update {progress.step}: acceptance length {progress.score:.3f} on unseen texts"
        if text:
            note(f"{CLEAR_LINE if replaces else ''}{text}")
        elif replaces:
            write(CLEAR_LINE + line_of(progress))
        elif time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            note(line_of(progress))


def say_result(evaluation: Evaluation) -> None:
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
    job: TrainingJob
    settings: TrainSettings


class JobOptions:
    data: list[Path] = option(
        ..., "Folder of 'draftree train data'; repeatable for data of one target.", "FOLDER", FILES
    )
    data_tokens: int | None = option(
        None,
        "Train on the first texts with so many tokens only, prompts included; on all texts if not given.",
        "N",
        FILES,
    )
    output: Path = option(..., "New folder of the result.", "FOLDER", FILES)
    resume: bool = option(False, "Continue the run in the output folder.", panel=FILES, names="--resume")


class BudgetOptions:
    minutes: float | None = option(
        None, "Minutes of training; 60 if neither --steps nor --tokens is given.", "X", BUDGET
    )
    steps: int | None = option(None, "Maximum number of updates.", "N", BUDGET)
    tokens: int | None = option(None, "Maximum number of trained predictions, repeated ones included.", "N", BUDGET)


class RecipeOptions:
    loss: str = option(
        "coupled",
        "Loss of the later part: coupled, coupled_miss, lk, lk_hybrid, tv, kl, reverse_kl or cross_entropy.",
        "NAME",
        RECIPE,
    )
    first_loss: str = option("kl", "Loss of the first part.", "NAME", RECIPE)
    first_share: float = option(0.5, "Share of the budget of the first part.", "X", RECIPE)
    temperature: float = option(0.8, "Temperature at which target and drafter are compared.", "X", RECIPE)
    levels: int = option(3, "Levels of training on the drafter's own states.", "N", RECIPE)
    levels_from: float = option(0.4, "Share of the budget that trains the first level only.", "X", RECIPE)
    optimizer: str = option("muon", "muon (matrices of layers; adamw for the rest) or adamw.", "NAME", RECIPE)
    learning_rate: float = option(2e-3, "Highest learning rate.", "X", RECIPE)
    warm_up: int = option(50, "Updates until the highest learning rate.", "N", RECIPE)
    batch_tokens: int = option(6144, "Tokens of a batch.", "N", RECIPE)
    max_length: int | None = option(None, "Cut longer texts; no limit if not given.", "N", RECIPE)
    seed: int = option(0, "Seed of first weights and of the order of texts.", "N", RECIPE)
    depth: int = option(4, "Levels of drafts in evaluations, and by default later.", "N", EVALUATION)
    evaluate_every: int = option(50, "Updates between evaluations on unseen texts.", "N", EVALUATION)


@takes_setup("device", "threads", "trust_remote_code")
@takes("paths", values_of(JobOptions))
@takes("budget", values_of(BudgetOptions))
@takes("recipe", values_of(RecipeOptions))
def run_of(
    *,
    paths: dict[str, Any],
    budget: dict[str, Any],
    recipe: dict[str, Any],
    level_decay: float | None = option(
        None,
        "Weight of each level relative to the one before; by survival of the drafts if not given.",
        "X",
        RECIPE,
        names="--level-decay",
    ),
    patience: int = option(
        8, "End after so many evaluations without a better acceptance length; 0 for no early end.", "N", EVALUATION
    ),
    unseen_share: float = option(0.05, "Share of the prompts that are kept for evaluations.", "X", EVALUATION),
    dtype: str = option(
        "auto",
        "Dtype of computation: auto, float32 or bfloat16; weights are updated in float32.",
        "NAME",
        EXECUTION,
    ),
    setup: Setup,
) -> Run:
    from draftree.train.preparing import TrainingJob
    from draftree.train.settings import Limits, TrainSettings
    from draftree.train.unroll import StepWeights

    if patience < 0:
        raise ConfigurationError(f"patience is {patience}: it must not be negative")
    if all(limit is None for limit in budget.values()):
        budget["minutes"] = DEFAULT_MINUTES
    settings = TrainSettings(
        Limits(**budget), weights=StepWeights(level_decay), patience=patience or None, dtype=dtype, **recipe
    )
    return Run(TrainingJob(options=replace(setup, dtype=dtype), unseen_share=unseen_share, **paths), settings)


def head_of(
    *,
    start: Path | None = option(None, "Start from this head; a new one if not given.", "FOLDER", FILES, names="--from"),
    draft_vocab: int | None = option(
        None, "Tokens that it can propose, by counts in the answers; 8192 if not given.", "N", HEAD
    ),
    features: str | None = option(
        None, "Layers that it reads, such as 2,15,27; all of the data if not given.", "LAYERS", HEAD
    ),
    layers: int = option(1, "Decoder layers.", "N", HEAD),
    train_output: bool = option(
        False, "Train the output head too; it stays the target's if not given.", panel=HEAD, names="--train-output"
    ),
) -> HeadOptions:
    from draftree.train.head import HeadOptions

    numbers = None if features is None else listed(features, "--features", kind=int, example="2,15,27")
    return HeadOptions(
        layers=layers, draft_vocab=draft_vocab, features=numbers, trains_output=train_output, start=start
    )


COVERED = 0.9  # share of tokens in the draft vocabulary above which a larger one gains little


def run_training(run: Run, work: Callable[[], T], *, resume: str = " with --resume") -> T:
    note(budget_line(run.settings))
    try:
        return work()
    except KeyboardInterrupt:
        note(f"interrupted: the last checkpoint is kept; the same command{resume} continues")
        raise typer.Exit(INTERRUPTED) from None


def say_trained(result: TrainingResult) -> None:
    for line in result.notes:
        note(line)
    say_result(result.evaluation)


def say_head(run: Run, result: TrainingResult) -> None:
    """Print the acceptance of a head, whether it pays, and its command; `auto` uses one that pays from now on."""
    say_trained(result)
    # processes other than the first evaluate nothing, and without unseen texts nothing is known
    if result.evaluation.modes:
        say_worth(result)
    say_use(run, result.folder, f"head:{result.folder}")


def say_worth(result: TrainingResult) -> None:
    """Print whether a head pays; remember one that does for `auto`."""
    from draftree.core.files import read_json
    from draftree.loading.auto_draft import LEAST_TOKENS, TrainedHead, keep_trained
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
    say(f"{folder}: draftree generate {run.job.options.model} --draft {draft}\n")


def budget_line(settings: TrainSettings) -> str:
    limits = settings.limits
    parts = [] if limits.minutes is None else [f"{limits.minutes:,g} minutes"]
    counts = ((limits.steps, "updates"), (limits.tokens, "predictions"))
    parts += [f"{count:,} {unit}" for count, unit in counts if count]
    early = "" if settings.patience is None else "; it ends earlier if the acceptance stops rising (--patience)"
    return f"training for up to {' or '.join(parts)}{early}"


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


@takes("run", run_of, fixed=OF_UNROLLS)
@takes("chosen", head_of, layers=2)
def block(
    *,
    run: Run,
    chosen: HeadOptions,
    markov_rank: int | None = option(
        None, "Rank of the bias by the token before, 0 for none; 64 for a new head if not given.", "N", HEAD
    ),
) -> None:
    """Train a DSpark-type head, whose blocks have as many tokens as --depth; '--draft head:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues.
    """
    from draftree.train.block import train_block

    settings = dataclasses.replace(run.settings, levels=run.settings.depth)
    result = run_training(
        run, lambda: train_block(run.job, settings, chosen, markov_rank=markov_rank, report=Lines(), note=note)
    )
    say_head(run, result)


BOOSTING = "Boosting"


@takes("run", run_of)
@takes("chosen", head_of)
def boost(
    *,
    run: Run,
    earlier: list[Path] = option(..., "Folder of an earlier head; repeatable, the best one first.", "FOLDER", BOOSTING),
    floor: float = option(0.05, "Least weight of a prediction.", "X", BOOSTING),
    chosen: HeadOptions,
) -> None:
    """Train a second head on what the first misses, and compare both with the best two tokens of the first.

    'draftree generate MODEL --draft head:FIRST+head:SECOND' merges their drafts. Ctrl-C keeps the last checkpoint.
    """
    from draftree.train.boost import train_boosted

    result, union = run_training(
        run, lambda: train_boosted(run.job, run.settings, chosen, earlier, floor=floor, report=Lines(), note=note)
    )
    say_trained(result)
    for kind, rows in union.items():
        lengths = ", ".join(f"{name} {row['acceptance_length']:.3f}" for name, row in rows.items())
        say(f"temperature {kind}, tokens per round: {lengths}\n")
    say_use(run, result.folder, "+".join(f"head:{folder}" for folder in (*earlier, result.folder)))


STUDENT = "Student"
WEIGHT_DECAY = 0.1
OF_HEADS = {"levels": 1, "levels_from": 0.5, "level_decay": None}


@takes("run", run_of, fixed=OF_HEADS, learning_rate=6e-4, batch_tokens=1024)
def distill(
    *,
    run: Run,
    start: str | None = option(
        None,
        "Start from this model; other tokens become the target's. A new one if not given.",
        "MODEL",
        STUDENT,
        names="--from",
    ),
    hidden: int = option(256, "Width of a new one.", "N", STUDENT),
    layers: int = option(4, "Layers of a new one.", "N", STUDENT),
    heads: int = option(4, "Attention heads of a new one.", "N", STUDENT),
    kept_layers: int | None = option(
        None, "Layers of the given model that stay, evenly spaced; all if not given.", "N", STUDENT
    ),
) -> None:
    """Train a small model on the target's own texts; 'draftree generate MODEL --draft model:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues.
    """
    from draftree.train.distill import StudentOptions, train_student

    chosen = StudentOptions(start, hidden, layers, heads, kept_layers=kept_layers)
    settings = dataclasses.replace(run.settings, weight_decay=WEIGHT_DECAY)
    result = run_training(run, lambda: train_student(run.job, settings, chosen, report=Lines(), note=note))
    say_trained(result)
    say_use(run, result.folder, f"model:{result.folder}")


STUDENT_START = "smollm2-135m-instruct"
TIMES_SMALLER = 4  # least bytes of a target's weights for each parameter of the model that a student starts from
UNSEEN_PROMPTS = 24  # prompts of the measurement, which no text of training answers
PLAN = "plan.json"
MAX_HOURS = 10_000


@takes_setup(*EXECUTION_OPTIONS, generation_config="none")
def auto(
    *,
    hours: float = option(2.0, "Hours for data, training and measurement together.", "X", BUDGET),
    output: Path | None = option(
        None,
        "Folder of data and drafter; one of an interrupted run is continued; MODEL-drafter if not given.",
        "FOLDER",
        FILES,
    ),
    prompts: list[str] | None = option(
        None, "As for 'draftree train data'; your own prompts train the better drafter.", "NAME|FILE", PROMPTS
    ),
    dry_run: bool = option(False, "Print the plan and end.", panel=BUDGET, names="--dry-run"),
    setup: Setup,
) -> None:
    """Train a drafter for a model on its own answers, measure it on unseen prompts, and keep it for --draft auto.

    Kind and size are those that should be fastest on this machine. Ctrl-C keeps what is done, and the same command
    continues.
    """
    require_sound(setup.model)
    if not 0 < hours <= MAX_HOURS:
        raise ConfigurationError(f"hours is {hours}: it must be above 0 and at most {MAX_HOURS:,}")
    folder = output or Path(f"{Path(setup.model).resolve().name.removesuffix('.gguf')}-drafter")
    if folder.exists() and not (folder / PLAN).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"'{folder}' exists, and no run of 'train auto': choose another --output")
    sets = prompt_sets(prompts)
    from draftree.train.finishing import RECIPE

    with alone(folder) if not dry_run else nullcontext():
        plan = make_data(setup, folder, sets, hours, dry_run=dry_run)
        if dry_run:
            return
        if not (folder / "drafter" / RECIPE).is_file():
            train_drafter(setup, plan, folder)
        measure_drafter(setup, plan, folder)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes from a folder, which is made if missing, and removed at the end if it is still empty."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = PathLock(folder)
    except BlockingIOError as error:
        raise ConfigurationError(f"another process works in '{folder}': wait until it ends") from error
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()
        lock.release()


def make_data(setup: Setup, folder: Path, sets: Sequence[PromptSet], hours: float, *, dry_run: bool) -> TrainingPlan:
    """Plan, and let the target answer prompts; the target is not in memory any more afterwards."""
    from draftree.cli.runs import fetch_and_load
    from draftree.train.automatic import STUDENT, TrainingPlan
    from draftree.train.data.capture import Capture, CaptureSettings

    plan_file = folder / PLAN
    setup = setup.plainly()
    loaded = fetch_and_load(setup)
    llm = setup.llm(loaded)

    def capture_of(kind: str, limit: int | None) -> tuple[Capture, CaptureSettings]:
        # a whole model reads tokens only: without hidden states, a text takes 2% of the space
        settings = CaptureSettings(limit_tokens=limit)
        if kind == STUDENT:
            settings = replace(settings, features="none", teacher="top-k:64")
        return Capture(llm, loaded, sets, settings), settings

    if plan_file.is_file():
        plan = TrainingPlan.read(plan_file)
        if plan.target != loaded.model.fingerprint:
            raise ConfigurationError(f"'{plan_file}' is for another model: choose another --output")
        if plan.hours != hours:
            raise ConfigurationError(
                f"'{plan_file}' is for --hours {plan.hours:g}: give the same, or choose another --output"
            )
        note(f"the plan of '{plan_file}' is continued")
    else:
        plan = plan_of(loaded, setup, *capture_of(STUDENT, None), hours)
        if not dry_run:
            plan.write(plan_file)
    note(str(plan))
    if plan.speedup < 1:
        note("on this machine, no drafter that is trained in this time is expected to pay: give more --hours")
    if dry_run:
        return plan
    capture, settings = capture_of(plan.kind, plan.data_tokens)
    stored = capture.found(folder / "data")
    if stored is None or (stored.num_tokens < plan.data_tokens and stored.next_prompt < len(capture.jobs)):
        prepare(capture, settings, folder / "data")
        run(capture, settings, folder / "data")
    write_unseen(capture, folder / "unseen.jsonl")
    return plan


def plan_of(
    loaded: LoadedModel, setup: Setup, capture: Capture, settings: CaptureSettings, hours: float
) -> TrainingPlan:
    """Measure the speeds of answers, of products and of rounds, and return the plan."""
    from draftree.loading.options import resolve_place
    from draftree.models.memory import inner_width
    from draftree.train.automatic import (
        Machine,
        Student,
        TargetSize,
        operations_per_second,
        plan_training,
        vocabularies_for,
    )
    from draftree.train.costs import head_costs, round_costs
    from draftree.train.data.capture import estimate
    from draftree.train.preparing import text_config
    from draftree.weights.catalogue import CATALOGUE

    device, dtype = resolve_place(dataclasses.replace(setup, dtype="auto"))
    answers = estimate(capture, settings)
    if not answers.tokens:
        raise ConfigurationError(f"'{loaded.name}' can answer none of the prompts: give others (--prompts)")
    target = TargetSize(
        fingerprint=loaded.model.fingerprint,
        hidden=capture.recipe.hidden,
        inner=inner_width(text_config(loaded)),
        vocab=capture.recipe.vocab,
    )
    machine = Machine(answers.tokens_per_second, operations_per_second(dtype, device), answers.tokens)
    heads = head_costs(loaded, vocabularies_for(target.vocab))
    start = CATALOGUE[STUDENT_START]
    student = None
    if start.num_parameters * TIMES_SMALLER <= loaded.model.footprint.weights:
        try:
            resolve_with_bar(start.name)
            student = Student(start.name, start.num_parameters, round_costs(loaded, f"model:{start.name}"))
        except DraftreeError as error:
            note(f"no student is considered: {error}")
    return plan_training(target, machine, hours, heads, student)


def write_unseen(capture: Capture, path: Path) -> None:
    """Write prompts for the measurement: the first ones that training does not see."""
    from draftree.train.data.shards import UNSEEN_SHARE, is_unseen, write_atomically

    jobs = [job for job in capture.jobs if is_unseen(job.prompt_id, UNSEEN_SHARE)][:UNSEEN_PROMPTS]
    if not jobs:
        raise ConfigurationError(
            f"{len(capture.jobs)} prompts are too few: one in {round(1 / UNSEEN_SHARE)} is kept for the measurement"
        )
    lines = [
        json.dumps({"id": f"unseen-{job.prompt_id}", "messages": [dict(message) for message in job.prompt.messages]})
        for job in jobs
    ]
    write_atomically(path, lambda new: new.write_text("".join(f"{line}\n" for line in lines), "utf-8"))


def train_drafter(setup: Setup, plan: TrainingPlan, folder: Path) -> None:
    from draftree.train.automatic import STUDENT, recipe_of
    from draftree.train.checkpoints import CHECKPOINT
    from draftree.train.preparing import TRAINING, TrainingJob
    from draftree.train.settings import Limits, TrainSettings

    output = folder / "drafter"
    job = TrainingJob(
        options=dataclasses.replace(setup.plainly(), dtype="auto"),
        data=(folder / "data",),
        output=output,
        resume=(output / TRAINING / CHECKPOINT).is_file(),
    )
    settings = TrainSettings(Limits(minutes=plan.minutes), **recipe_of(plan.kind))

    def work() -> TrainingResult:
        if plan.kind == STUDENT:
            from draftree.train.distill import StudentOptions, train_student

            resolve_with_bar(str(plan.start))
            return train_student(job, settings, StudentOptions(plan.start), report=Lines(), note=note)
        from draftree.train.head import HeadOptions, train_head

        return train_head(job, settings, HeadOptions(draft_vocab=plan.draft_vocab), report=Lines(), note=note)

    say_trained(run_training(Run(job, settings), work, resume=""))


def measure_drafter(setup: Setup, plan: TrainingPlan, folder: Path) -> None:
    """Measure the drafter beside all others on unseen prompts, and keep the fastest for `auto`."""
    from draftree.lab.tune.drafts import DraftSearch, DraftTuneSettings
    from draftree.train.automatic import MEASURED, STUDENT

    minutes = 60 * plan.hours * MEASURED
    kind = "model" if plan.kind == STUDENT else "head"
    spec = f"{kind}:{(folder / 'drafter').resolve()}"
    settings = DraftTuneSettings(setup, prompts=folder / "unseen.jsonl", drafts=(spec,), minutes=minutes)
    search = DraftSearch(settings, fetch=resolve_with_bar)
    announce(search, minutes)
    is_complete = measure(search)
    say(table(search.contest.standings(), search.predicted))
    say_differences(search)
    if not is_complete:
        note("interrupted: the measurements are kept, and the same command continues")
        raise typer.Exit(INTERRUPTED)
    if not conclude(search, save=True):
        raise typer.Exit(1)


PACKAGE = "package"
SERVERS = ("speculators", "sglang", "llama.cpp", PACKAGE)
"""Values of `--to`: the layout of speculators for vLLM, folders for SGLang, GGUF files, and heads of this package."""


def export(
    folder: Path = argument(..., "Folder of a head, or of a small whole model.", "FOLDER"),
    *,
    to: str = option(
        ...,
        "speculators (for vLLM), sglang, llama.cpp (a GGUF file), or package: the small folder in which this package "
        "ships a head.",
        "|".join(SERVERS),
        names="--to",
        show_default=False,
    ),
    target: str = option(..., "The target: a name of 'draftree models', a folder or a hub id.", "MODEL"),
    output: Path = option(..., "New folder; with --to llama.cpp, new file.", "PATH"),
    served_as: str | None = option(
        None,
        "Name of the target in the files, such as a hub id; with --to llama.cpp, its GGUF file, if --target is none. "
        "Its folder if not given.",
        "NAME",
    ),
    licence: str | None = option(
        None, "With --to package: licence of the weights; the target's in 'draftree models' if not given.", "NAME"
    ),
    int8: bool = option(False, "With --to package: store matrices in 8 bits.", names="--int8"),
) -> None:
    """Write a drafter for vLLM, SGLang or llama.cpp and print how to serve it, or write the folder of a head of this
    package.
    """
    if to not in SERVERS:
        raise ConfigurationError(f"option --to is '{to}': {suggestion(to, SERVERS)}")
    if to == PACKAGE:
        refuse(served_as is not None, "--served-as", "--to package names the target by itself: leave it out")
        from draftree.train.export import ship_head

        lines = ship_head(folder, target=target, output=output, licence=licence, int8=int8)
        say("".join(f"{line}\n" for line in lines))
        return
    for name, is_given in (("--licence", licence is not None), ("--int8", int8)):
        refuse(is_given, name, "only --to package takes it: leave it out")
    from draftree.train.export import export_drafter

    lines = export_drafter(folder, to=to, target=target, output=output, served_as=served_as)
    note(f"wrote {output}; serve it with:")
    say("".join(f"{line}\n" for line in lines))


train = group_of(
    "Make training data from a target's own texts, and train drafters on them.",
    {
        "auto": auto,
        "prompts": prompts,
        "data": data,
        "head": head,
        "block": block,
        "distill": distill,
        "boost": boost,
        "export": export,
    },
)
