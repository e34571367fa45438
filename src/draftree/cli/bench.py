"""`draftree bench`: benchmark commands and reports of their results."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from draftree.cli.layout import OUTPUT, argument, group_of, option
from draftree.cli.options import (
    EXECUTION_OPTIONS,
    PARALLEL_OPTIONS,
    Setup,
    complete_draft,
    complete_plan,
    complete_verify,
    require_new,
    takes,
    takes_setup,
    values_of,
)
from draftree.cli.render import INTERRUPTED, note, resolve_with_bar, transient_bar, wide_console
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


class MethodOptions:
    drafts: list[str] = option(
        [],
        "A method besides plain decoding: ngram, model:NAME,k=4; its own planner or verifier after @ "
        "(ngram@heuristic, model:NAME@fixed:4@token); repeatable.",
        "SPEC[@PLAN][@VERIFY]",
        COMPARED,
        names="--draft",
        complete=complete_draft,
    )
    plans: list[str] = option(
        [],
        "Planner of every method without its own; repeatable, one method per planner.",
        "POLICY",
        COMPARED,
        names="--plan",
        complete=complete_plan,
    )
    verify: str = option(
        "coupled", "Verifier of every method without its own.", "RULE", COMPARED, complete=complete_verify
    )


class PromptOptions:
    prompts: Path | None = option(
        None,
        "JSON lines with 'prompt' or 'messages' and 'category', Spec-Bench or HumanEval; "
        "a small built-in set if not given.",
        "FILE",
        PROMPTS,
    )
    categories: list[str] = option(
        [], "Only prompts of this category; repeatable.", "NAME", PROMPTS, names="--category"
    )
    limit: int | None = option(None, "Maximum number of prompts per category.", "N", PROMPTS)
    max_tokens: int = option(128, "Maximum number of tokens per text.", "N", HOW)
    seed: int = option(0, "Seed of every text.", "N", HOW)


class BenchOptions(PromptOptions, MethodOptions):
    temperature: float = option(0.0, "0 takes the most likely token.", "X", HOW)
    repeats: int = option(3, "Number of repetitions of each text.", "N", HOW)


RESULTS: Any = option(None, "Results file, JSON lines: provenance, then every measurement.", "FILE", HOW)


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

    show(results, wide_console(WIDTH))


@contextmanager
def record_file(output: Path | None) -> Iterator[RecordFile]:
    """Open a new results file; without a name, the lines are only kept in memory."""
    from draftree.lab.bench.records import RecordFile

    if output is None:
        yield RecordFile(None)
        return
    with output.open("x", encoding="utf-8") as stream:
        yield RecordFile(stream)


@takes_setup(*EXECUTION_OPTIONS, *PARALLEL_OPTIONS)
@takes("work", values_of(BenchOptions))
def run(
    *,
    work: dict[str, Any],
    peer: bool = option(
        False, "Run the same jobs with transformers, interleaved.", panel=COMPARED, names="--peer/--no-peer"
    ),
    batch: int = option(1, "Number of concurrent prompts.", "N", HOW),
    setup: Setup,
    output: Path | None = RESULTS,
    record: Path | None = option(
        None, "A folder for a trace of each drafting method, for 'bench simulate'.", "DIR", HOW
    ),
) -> None:
    """Run every prompt with every method, interleaved, and compare the speeds."""
    leave_to_rank_zero(setup)
    require_new(output)
    if record is not None and record.exists():
        raise ConfigurationError(f"'{record}' already exists, and traces are never overwritten: choose another path")
    from draftree.lab.bench.benchmark import BenchSettings

    run_and_show(BenchSettings(setup, **work, batch=batch, peer=peer), output, record)


def run_and_show(settings: BenchSettings, output: Path | None, record: Path | None) -> None:
    """Measure, write the results and print their tables; Ctrl-C keeps complete prompts."""
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
    with transient_bar("prompts", sum(map(len, groups))) as show:
        for group, measured in zip(groups, records or ready.run(), strict=True):
            for record in measured:
                lines.add("record", record)
            show(advance=len(group))


@takes_setup(*EXECUTION_OPTIONS)
def passes(
    *,
    rows: str = option("1,2,4,8,16,32,64", "Numbers of tokens per pass.", "N,N,...", COMPARED),
    prefix: int | None = option(
        None, "Tokens before the pass; if not given, 256, or as many as fit into a shorter context.", "N", COMPARED
    ),
    repeats: int = option(20, "Passes of each kind.", "N", HOW),
    setup: Setup,
    output: Path | None = RESULTS,
) -> None:
    """Time passes of a model by number of tokens, with the lower bound from memory bandwidth."""
    require_new(output)
    counts = listed(rows, "--rows", kind=int, example="1,2,4")
    from draftree.lab.bench.passes import PassSettings, measure

    header, records = measure(PassSettings(setup, rows=counts, prefix=prefix, repeats=repeats), fetch=resolve_with_bar)
    write_and_show(output, header, (("pass", record) for record in records))


@takes_setup("device", "kernels", "threads", "trust_remote_code")
def perplexity(
    *,
    text: Path = option(..., "A file of UTF-8 text.", "FILE", PROMPTS),
    weights: list[str] | None = option(
        None,
        "auto, float32, bfloat16, float16, float64, int8, int4; repeatable, each is compared with the first.",
        "KIND",
        COMPARED,
    ),
    limit: int | None = option(None, "Maximum number of tokens of the text.", "N", PROMPTS),
    dtype: str = option("auto", "Dtype of keys and values with int8 or int4 weights.", "NAME", HOW),
    setup: Setup,
    output: Path | None = RESULTS,
) -> None:
    """Measure the perplexity of a text; with several kinds of weights, compare each with the first."""
    require_new(output)
    from draftree.lab.bench.perplexity import PerplexitySettings, measure

    setup = dataclasses.replace(setup, dtype=dtype)
    settings = PerplexitySettings(setup, text=text, weights=tuple(weights or ("auto",)), limit=limit)
    header, records = measure(settings, fetch=resolve_with_bar)

    def noted() -> Iterator[tuple[str, PerplexityRecord]]:
        for record in records:
            if record.fallback_reason != header["fallback_reason"]:  # the header tells the first one's
                note_kernels({**header, "kernels": record.kernels, "fallback_reason": record.fallback_reason})
            yield "perplexity", record

    write_and_show(output, header, noted())


def simulate(
    trace: Path = argument(..., "A trace from --record.", "TRACE"),
    *,
    plan: list[str] | None = option(
        None,
        "A planner to simulate; repeatable. Plain decoding is always included.",
        "POLICY",
        COMPARED,
        complete=complete_plan,
    ),
) -> None:
    """Replay a trace under other planners, without a model."""
    from draftree.engine.trace import read_trace
    from draftree.lab.analysis.simulation import replays

    typer.echo(replays(read_trace(trace), plan or ("adaptive", "fixed")))


def report(
    files: list[Path] = argument(..., "Results files from --output.", "FILE..."),
    *,
    markdown: bool = option(False, "Tables for a document.", panel="Output", names="--markdown"),
    plots: Path | None = option(
        None, "A folder for figures (SVG, PNG, PDF) instead of tables; needs the extra 'plots'.", "DIR", "Output"
    ),
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


WORSE = 1  # exit status if something is worse than the baseline, or a submission is not valid
BASELINE = "Baseline"

FILES: Any = argument(..., "Submissions.", "FILE...")


@takes_setup(*EXECUTION_OPTIONS)
@takes("work", values_of(BenchOptions), fixed={"prompts": None}, repeats=1)
def suite(
    *,
    work: dict[str, Any],
    spec_bench: Path | None = option(None, "Questions of Spec-Bench, JSON lines.", "FILE", PROMPTS),
    humaneval: Path | None = option(None, "Tasks of HumanEval, JSON lines.", "FILE", PROMPTS),
    shipped: bool = option(True, "Use the prompts of the package.", panel=PROMPTS, names="--shipped/--no-shipped"),
    setup: Setup,
    baseline: Path | None = option(
        None, "A stored submission; the exit status is 1 if a method is worse now.", "FILE", BASELINE
    ),
    tokens_tolerance: float = option(0.02, "Share by which tokens per pass may be lower.", "X", BASELINE),
    score_tolerance: float = option(0.25, "Share by which the speed over plain may be lower.", "X", BASELINE),
    output: Path | None = option(
        None,
        "Submission, JSON. Measurements are kept beside it in a file .jsonl, and the same command continues an "
        "interrupted run.",
        "FILE",
        OUTPUT,
    ),
) -> None:
    """Score methods on prompt sets, interleaved with plain decoding, for a submission that others can compare.

    Without --draft: lookups, and the trained head of the package if there is one. Ctrl-C loses nothing with --output:
    the same command continues.
    """
    require_new(output)
    from draftree.lab.bench.suite.comparison import Tolerance, require_same_run
    from draftree.lab.bench.suite.run import SuiteRun, SuiteSettings, prepare_suite, resumed
    from draftree.lab.bench.suite.submission import facts_of, read_submission

    tolerance = Tolerance(tokens_tolerance, score_tolerance)
    stored = None if baseline is None else read_submission(baseline)
    sets = sets_of(spec_bench, humaneval, shipped=shipped)
    settings = SuiteSettings(setup, **work, sets=sets)
    journal = None if output is None else output.with_suffix(".jsonl")
    if journal is not None and journal == output:
        raise ConfigurationError(f"'{output}' ends with .jsonl, as the measurements beside it do: end it with .json")
    ready = prepare_suite(settings, fetch=resolve_with_bar)
    if stored is not None:
        require_same_run(facts_of(ready.header), stored)
    submission = run_suite(resumed(ready, journal) if journal else SuiteRun(ready, {}), journal)
    name = "this run" if output is None else output.stem
    if output is not None:
        output.write_text(json.dumps(submission, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    show(name, submission)
    if stored is not None:
        compare(submission, stored, tolerance)


def suite_check(files: list[Path] = FILES) -> None:
    """Validate submissions by the schema, and compute their scores again; the exit status is 1 if one is not valid."""
    from draftree.lab.bench.suite.submission import read_submission

    is_valid = True
    for path in files:
        try:
            submission = read_submission(path)
            typer.echo(f"{path}: valid, {len(submission['methods'])} methods on {len(submission['prompts'])} prompts")
        except ConfigurationError as error:
            note(str(error))
            is_valid = False
    if not is_valid:
        raise typer.Exit(WORSE)


def suite_table(
    files: list[Path] = FILES,
    *,
    csv: bool = option(False, "One line per submission, method and category.", panel=OUTPUT, names="--csv"),
) -> None:
    """Print a table of submissions as Markdown or CSV; submissions of other prompts or arguments are refused."""
    from draftree.lab.bench.suite.comparison import comparison, names_of, to_csv
    from draftree.lab.bench.suite.submission import read_submission

    submissions = {name: read_submission(path) for name, path in zip(names_of(files), files, strict=True)}
    typer.echo(to_csv(submissions) if csv else comparison(submissions), nl=False)


def sets_of(spec_bench: Path | None, humaneval: Path | None, *, shipped: bool) -> tuple[PromptSet, ...]:
    from draftree.lab.bench.suite.run import HUMANEVAL, SHIPPED_SET, SPEC_BENCH, PromptSet

    files = ((SPEC_BENCH, spec_bench), (HUMANEVAL, humaneval))
    named = [PromptSet(name, path) for name, path in files if path is not None]
    return (*([PromptSet(SHIPPED_SET)] if shipped else []), *named)


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

    console = wide_console(WIDTH)
    console.print(provenance(name, submission), style="dim", highlight=False)
    named = {name: submission}
    for grid in (suite_grid(named), score_grid(named), score_grid(named, "tokens_per_pass")):
        console.print()
        console.print(grid.title, style="bold", highlight=False)
        console.print(grid.rich())


def compare(submission: dict[str, Any], baseline: dict[str, Any], tolerance: Tolerance) -> None:
    """Print what is worse than the baseline."""
    from draftree.lab.bench.suite.comparison import regressions

    worse = regressions(submission, baseline, tolerance)
    for regression in worse:
        note(f"worse than the baseline: {regression}")
    if worse:
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
