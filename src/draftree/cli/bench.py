"""`draftree bench`: benchmark commands and reports of their results."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftree.cli.layout import OUTPUT, argument, group_of, option
from draftree.cli.options import (
    EXECUTION_OPTIONS,
    PARALLEL_OPTIONS,
    Model,
    Setup,
    complete_draft,
    complete_plan,
    complete_verify,
    require_new,
    takes_setup,
)
from draftree.cli.render import note
from draftree.core.errors import ConfigurationError, require_extra
from draftree.parallel.entry import leave_to_rank_zero

if TYPE_CHECKING:
    from draftree.lab.bench.benchmark import Benchmark, BenchSettings
    from draftree.lab.bench.records import PerplexityRecord, RecordFile, Results
    from draftree.lab.bench.records import Record as BenchRecord
    from draftree.lab.bench.suite.comparison import Tolerance
    from draftree.lab.bench.suite.run import PromptSet, SuiteRun
    from draftree.lab.bench.workload import Prompt

COMPARED = "Methods"
PROMPTS = "Prompts"
HOW = "Measurement"
WIDTH = 160

Number = TypeVar("Number", int, float)


Output = Annotated[Path | None, option("Results file, JSON lines: provenance, then every measurement.", "FILE", HOW)]
Prompts = Annotated[
    Path | None,
    option(
        "JSON lines with 'prompt' or 'messages' and 'category', Spec-Bench or HumanEval; "
        "a small built-in set if not given.",
        "FILE",
        PROMPTS,
    ),
]
Category = Annotated[list[str] | None, option("Only prompts of this category; repeatable.", "NAME", PROMPTS)]
Limit = Annotated[int | None, option("Maximum number of prompts per category.", "N", PROMPTS)]
MaxTokens = Annotated[int, option("Maximum number of tokens per text.", "N", HOW)]
Seed = Annotated[int, option("Seed of every text.", "N", HOW)]
Temperature = Annotated[float, option("0 takes the most likely token.", "X", HOW)]
Repeats = Annotated[int, option("Number of repetitions of each text.", "N", HOW)]
Drafts = Annotated[
    list[str] | None,
    option(
        "A method besides plain decoding: ngram, model:NAME,k=4; its own planner or verifier after @ "
        "(ngram@heuristic, model:NAME@fixed:4@token); repeatable.",
        "SPEC[@PLAN][@VERIFY]",
        COMPARED,
        complete=complete_draft,
    ),
]
Plans = Annotated[
    list[str] | None,
    option(
        "Planner of every method without its own; repeatable, one method per planner.",
        "POLICY",
        COMPARED,
        complete=complete_plan,
    ),
]
Verify = Annotated[str, option("Verifier of every method without its own.", "RULE", COMPARED, complete=complete_verify)]


def listed(text: str, option: str, *, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    try:
        return tuple(kind(number) for number in text.split(","))
    except ValueError as error:
        named = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"'{text}' is not a list of {named} such as {example}", param_hint=option) from error


def write_and_show(output: Path | None, header: Any, lines_of: Iterable[tuple[str, Any]]) -> None:
    from draftree.lab.bench.benchmark import end_line

    with record_file(output) as lines:
        lines.add("header", header)
        note_kernels(header)
        for kind, record in lines_of:
            lines.add(kind, record)
        lines.add("end", end_line(complete=True))
    show_results(lines.results("this run"))


def note_kernels(header: Mapping[str, Any]) -> None:
    """Report on standard error why the native kernels are not used on a CPU."""
    if header.get("fallback_reason") is not None and header.get("device") == "cpu":
        note(f"kernels: {header['kernels']} ({header['fallback_reason']})")


def show_results(results: Results) -> None:
    """Print the tables of results, at full width if standard output is not a terminal."""
    from draftree.lab.bench.tables import show

    console = Console()
    # a file or a pipe has no width: tables must not be truncated there
    show(results, console if console.is_terminal else Console(width=WIDTH))


@contextmanager
def record_file(output: Path | None) -> Iterator[RecordFile]:
    """Open a new results file; without a name, the lines are only kept in memory."""
    from draftree.lab.bench.records import RecordFile

    if output is None:
        yield RecordFile(None)
        return
    with output.open("x", encoding="utf-8") as stream:
        yield RecordFile(stream)


INTERRUPTED = 130


@takes_setup(*EXECUTION_OPTIONS, *PARALLEL_OPTIONS)
def run(
    model: Model,
    *,
    draft: Drafts = None,
    plan: Plans = None,
    verify: Verify = "coupled",
    peer: Annotated[
        bool, option("Run the same jobs with transformers, interleaved.", panel=COMPARED, names="--peer/--no-peer")
    ] = False,
    prompts: Prompts = None,
    category: Category = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    repeats: Repeats = 3,
    batch: Annotated[int, option("Number of concurrent prompts.", "N", HOW)] = 1,
    setup: Setup,
    output: Output = None,
    record: Annotated[
        Path | None, option("A folder for a trace of each drafting method, for 'bench simulate'.", "DIR", HOW)
    ] = None,
) -> None:
    """Run every prompt with every method, interleaved, and compare the speeds."""
    setup = dataclasses.replace(setup, model=model)
    leave_to_rank_zero(setup)
    require_new(output)
    if record is not None and record.exists():
        raise ConfigurationError(f"'{record}' already exists, and traces are never overwritten: choose another path")
    from draftree.lab.bench.benchmark import BenchSettings

    settings = BenchSettings(
        setup,
        drafts=tuple(draft or ()),
        plans=tuple(plan or ()),
        verify=verify,
        prompts=prompts,
        categories=tuple(category or ()),
        limit=limit,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        repeats=repeats,
        batch=batch,
        peer=peer,
    )
    run_and_show(settings, output, record)


def run_and_show(settings: BenchSettings, output: Path | None, record: Path | None) -> None:
    """Measure, write the results and print their tables; Ctrl-C keeps complete prompts."""
    from draftree.cli.render import resolve_with_bar
    from draftree.cli.runs import Recordings
    from draftree.lab.bench.benchmark import end_line, prepare

    complete = False
    with Recordings(record) as traces, record_file(output) as lines:
        ready = prepare(settings, fetch=resolve_with_bar, on_round=traces.of)
        for warning in ready.warnings:
            sys.stderr.write(f"{warning}\n")
        lines.add("header", ready.header)
        note_kernels(ready.header)
        try:
            ready.warm_up()
            traces.begin(ready, settings.options.model)
            write_all(ready, lines)
            complete = True
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: prompts that some methods did not finish are left out\n")
        lines.add("end", end_line(complete=complete))
    results = lines.results("this run")
    if results.records:
        show_results(results)
    if not complete:
        raise typer.Exit(INTERRUPTED)


def write_all(
    ready: Benchmark,
    lines: RecordFile,
    *,
    groups: Sequence[Sequence[Prompt]] | None = None,
    records: Iterator[list[BenchRecord]] | None = None,
) -> None:
    groups = ready.groups if groups is None else groups
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(len(group) for group in groups))
        for group, found in zip(groups, records or ready.run(), strict=True):
            for record in found:
                lines.add("record", record)
            bar.advance(task, len(group))


@takes_setup(*EXECUTION_OPTIONS)
def passes(
    model: Model,
    *,
    rows: Annotated[str, option("Numbers of tokens per pass.", "N,N,...", COMPARED)] = "1,2,4,8,16,32,64",
    prefix: Annotated[
        int | None,
        option("Tokens before the pass; if not given, 256, or as many as fit into a shorter context.", "N", COMPARED),
    ] = None,
    repeats: Annotated[int, option("Passes of each kind.", "N", HOW)] = 20,
    setup: Setup,
    output: Output = None,
) -> None:
    """Time passes of a model by number of tokens, with the lower bound from memory bandwidth."""
    require_new(output)
    counts = listed(rows, "--rows", kind=int, example="1,2,4")
    from draftree.cli.render import resolve_with_bar
    from draftree.lab.bench.passes import PassSettings, measure

    settings = PassSettings(
        dataclasses.replace(setup, model=model),
        rows=counts,
        prefix=prefix,
        repeats=repeats,
    )
    header, records = measure(settings, fetch=resolve_with_bar)
    write_and_show(output, header, (("pass", record) for record in records))


@takes_setup("device", "kernels", "threads", "trust_remote_code")
def perplexity(
    model: Model,
    *,
    text: Annotated[Path, option("A file of UTF-8 text.", "FILE", PROMPTS)],
    weights: Annotated[
        list[str] | None,
        option(
            "auto, float32, bfloat16, float16, float64, int8, int4; repeatable, each is compared with the first.",
            "KIND",
            COMPARED,
        ),
    ] = None,
    limit: Annotated[int | None, option("Maximum number of tokens of the text.", "N", PROMPTS)] = None,
    dtype: Annotated[str, option("Dtype of keys and values with int8 or int4 weights.", "NAME", HOW)] = "auto",
    setup: Setup,
    output: Output = None,
) -> None:
    """Measure the perplexity of a text; with several kinds of weights, compare each with the first."""
    require_new(output)
    from draftree.cli.render import resolve_with_bar
    from draftree.lab.bench.perplexity import PerplexitySettings, measure

    settings = PerplexitySettings(
        dataclasses.replace(setup, model=model, dtype=dtype),
        text=text,
        weights=tuple(weights or ("auto",)),
        limit=limit,
    )
    header, records = measure(settings, fetch=resolve_with_bar)
    write_and_show(output, header, (("perplexity", noted(record, header["device"])) for record in records))


def noted(record: PerplexityRecord, device: str) -> PerplexityRecord:
    note_kernels({"kernels": record.kernels, "fallback_reason": record.fallback_reason, "device": device})
    return record


def simulate(
    trace: Annotated[Path, argument("A trace from --record.", "TRACE")],
    *,
    plan: Annotated[
        list[str] | None,
        option(
            "A planner to simulate; repeatable. Plain decoding is always included.",
            "POLICY",
            COMPARED,
            complete=complete_plan,
        ),
    ] = None,
) -> None:
    """Replay a trace under other planners, without a model."""
    from draftree.engine.trace import read_trace
    from draftree.lab.analysis.simulation import replays

    typer.echo(replays(read_trace(trace), plan or ("adaptive", "fixed")))


def report(
    files: Annotated[list[Path], argument("Results files from --output.", "FILE...")],
    *,
    markdown: Annotated[bool, option("Tables for a document.", panel="Output", names="--markdown")] = False,
    plots: Annotated[
        Path | None,
        option("A folder for figures (SVG, PNG, PDF) instead of tables; needs the extra 'plots'.", "DIR", "Output"),
    ] = None,
) -> None:
    """Print the tables of results files, or plot them."""
    from draftree.lab.bench.records import read_results
    from draftree.lab.bench.tables import markdown as as_markdown

    if plots is not None:
        from draftree.lab.figures.results import draw_all

        require_extra("plots", "--plots needs", error=ConfigurationError)
        for path in draw_all([read_results(path) for path in files], plots):
            typer.echo(path)
        return
    for number, results in enumerate([read_results(path) for path in files]):
        if number:
            typer.echo()
        if markdown:
            typer.echo(f"### {results.name}\n\n{as_markdown(results)}", nl=False)
        else:
            typer.echo(results.name)
            show_results(results)


WORSE = 1
"""Exit status if something is worse than the baseline, or a submission is not valid."""
BASELINE = "Baseline"

Files = Annotated[list[Path], argument("Submissions.", "FILE...")]


@takes_setup(*EXECUTION_OPTIONS)
def suite(
    model: Model,
    *,
    draft: Drafts = None,
    plan: Plans = None,
    verify: Verify = "coupled",
    spec_bench: Annotated[Path | None, option("Questions of Spec-Bench, JSON lines.", "FILE", PROMPTS)] = None,
    humaneval: Annotated[Path | None, option("Tasks of HumanEval, JSON lines.", "FILE", PROMPTS)] = None,
    shipped: Annotated[
        bool, option("Use the prompts of the package.", panel=PROMPTS, names="--shipped/--no-shipped")
    ] = True,
    category: Category = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    repeats: Repeats = 1,
    setup: Setup,
    baseline: Annotated[
        Path | None, option("A stored submission; the exit status is 1 if a method is worse now.", "FILE", BASELINE)
    ] = None,
    tokens_tolerance: Annotated[float, option("Share by which tokens per pass may be lower.", "X", BASELINE)] = 0.02,
    score_tolerance: Annotated[
        float, option("Share by which the speed over plain may be lower.", "X", BASELINE)
    ] = 0.25,
    output: Annotated[
        Path | None,
        option(
            "Submission, JSON. Measurements are kept beside it in a file .jsonl, and the same command continues an "
            "interrupted run.",
            "FILE",
            OUTPUT,
        ),
    ] = None,
) -> None:
    """Score methods on prompt sets, interleaved with plain decoding, for a submission that others can compare.

    Without --draft: lookups, and the trained head of the package if there is one. Ctrl-C loses nothing with --output:
    the same command continues.
    """
    require_new(output)
    from draftree.cli.render import resolve_with_bar
    from draftree.lab.bench.suite.comparison import Tolerance, require_same_run
    from draftree.lab.bench.suite.run import SuiteSettings, prepare_suite, resumed
    from draftree.lab.bench.suite.submission import facts_of, read_submission

    tolerance = Tolerance(tokens_tolerance, score_tolerance)
    stored = None if baseline is None else read_submission(baseline)
    settings = SuiteSettings(
        dataclasses.replace(setup, model=model),
        drafts=tuple(draft or ()),
        plans=tuple(plan or ()),
        verify=verify,
        sets=sets_of(spec_bench, humaneval, shipped=shipped),
        categories=tuple(category or ()),
        limit=limit,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        repeats=repeats,
    )
    journal = None if output is None else journal_of(output)
    ready = prepare_suite(settings, fetch=resolve_with_bar)
    if stored is not None:
        require_same_run(facts_of(ready.header), stored)
    submission = run_suite(resumed(ready, journal) if journal else _fresh(ready), journal)
    name = "this run" if output is None else output.stem
    if output is not None:
        output.write_text(json.dumps(submission, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    show(name, submission)
    if stored is not None:
        compare(submission, stored, tolerance)


def suite_check(files: Files) -> None:
    """Validate submissions by the schema, and compute their scores again; the exit status is 1 if one is not valid."""
    from draftree.lab.bench.suite.submission import read_submission

    is_valid = True
    for path in files:
        try:
            found = read_submission(path)
        except ConfigurationError as error:
            note(str(error))
            is_valid = False
            continue
        typer.echo(f"{path}: valid, {len(found['methods'])} methods on {len(found['prompts'])} prompts")
    if not is_valid:
        raise typer.Exit(WORSE)


def suite_table(
    files: Files,
    *,
    csv: Annotated[bool, option("One line per submission, method and category.", panel=OUTPUT, names="--csv")] = False,
) -> None:
    """Print a table of submissions as Markdown or CSV; submissions of other prompts or arguments are refused."""
    from draftree.lab.bench.suite.comparison import comparison, names_of, to_csv
    from draftree.lab.bench.suite.submission import read_submission

    found = {name: read_submission(path) for name, path in zip(names_of(files), files, strict=True)}
    typer.echo(to_csv(found) if csv else comparison(found), nl=False)


def sets_of(spec_bench: Path | None, humaneval: Path | None, *, shipped: bool) -> tuple[PromptSet, ...]:
    from draftree.lab.bench.suite.run import HUMANEVAL, SHIPPED_SET, SPEC_BENCH, PromptSet

    found = [PromptSet(SHIPPED_SET)] if shipped else []
    found += [PromptSet(SPEC_BENCH, spec_bench)] if spec_bench is not None else []
    found += [PromptSet(HUMANEVAL, humaneval)] if humaneval is not None else []
    return tuple(found)


def journal_of(output: Path) -> Path:
    """Return the file of measurements beside a submission."""
    journal = output.with_suffix(".jsonl")
    if journal == output:
        raise ConfigurationError(f"'{output}' ends with .jsonl, as the measurements beside it do: end it with .json")
    return journal


def _fresh(ready: Any) -> SuiteRun:
    from draftree.lab.bench.suite.run import SuiteRun

    return SuiteRun(ready, {})


def run_suite(ready: SuiteRun, journal: Path | None) -> dict[str, Any]:
    """Measure what is left, and return the submission; Ctrl-C keeps complete prompts in the journal."""
    from draftree.lab.bench.benchmark import end_line
    from draftree.lab.bench.records import RecordFile
    from draftree.lab.bench.suite.submission import submission_of

    benchmark = ready.benchmark
    for warning in benchmark.warnings:
        note(warning)
    note_kernels(benchmark.header)
    if ready.done:
        note(f"{len(ready.done)} of {len(benchmark.groups)} prompts of an earlier run are used")
    lines = RecordFile(None)
    temporary = None if journal is None else journal.with_name(journal.name + ".new")
    if journal is not None and temporary is not None:
        # the lines of a run that was killed may be incomplete: only complete prompts are written again
        with temporary.open("w", encoding="utf-8") as stream:
            lines.stream = stream
            ready.begin(lines)
        temporary.replace(journal)
        lines.stream = journal.open("a", encoding="utf-8")
    else:
        ready.begin(lines)
    try:
        benchmark.warm_up()
        write_all(benchmark, lines, groups=[benchmark.groups[number] for number in ready.left], records=ready.run())
    except KeyboardInterrupt:
        kept = f"kept in {journal}, and the same command continues" if journal is not None else "lost without --output"
        sys.stderr.write(f"interrupted: measurements of complete prompts are {kept}\n")
        raise typer.Exit(INTERRUPTED) from None
    else:
        lines.add("end", end_line(complete=True))
    finally:
        if lines.stream is not None:
            lines.stream.close()
    return submission_of(lines.results("this run"))


def show(name: str, submission: dict[str, Any]) -> None:
    from draftree.lab.bench.suite.comparison import provenance, score_grid, suite_grid

    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(provenance(name, submission), style="dim", highlight=False)
    one = {name: submission}
    for grid in (suite_grid(one), score_grid(one), score_grid(one, "tokens_per_pass")):
        console.print()
        console.print(grid.title, style="bold", highlight=False)
        console.print(grid.rich())


def compare(submission: dict[str, Any], baseline: dict[str, Any], tolerance: Tolerance) -> None:
    """Print what is worse than the baseline."""
    from draftree.lab.bench.suite.comparison import regressions

    found = regressions(submission, baseline, tolerance)
    for one in found:
        note(f"worse than the baseline: {one}")
    if found:
        raise typer.Exit(WORSE)
    typer.echo("nothing is worse than the baseline")


bench = group_of(
    "Measure methods against plain decoding; 'bench MODEL' is short for 'bench run MODEL'.",
    {
        "run": run,
        "passes": passes,
        "perplexity": perplexity,
        "simulate": simulate,
        "report": report,
        "suite": suite,
        "suite-check": suite_check,
        "suite-table": suite_table,
    },
    default="run",
)
