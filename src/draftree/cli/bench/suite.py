"""`draftree bench suite`, `suite-check` and `suite-table`: comparable scores, submissions, and their tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftree.cli.bench.options import (
    PROMPTS,
    WIDTH,
    Category,
    Drafts,
    Limit,
    MaxTokens,
    Plans,
    Repeats,
    Seed,
    Temperature,
    Verify,
    note_kernels,
)
from draftree.cli.bench.run import INTERRUPTED, write_all
from draftree.cli.made import takes
from draftree.cli.options import OUTPUT, Model, require_new
from draftree.cli.render import note
from draftree.cli.running import Execution, execution_of
from draftree.core.errors import ConfigurationError

if TYPE_CHECKING:
    from draftree.lab.bench.suite.comparison import Tolerance
    from draftree.lab.bench.suite.run import PromptSet, SuiteRun

__all__ = ["suite", "suite_check", "suite_table"]

WORSE = 1
"""Exit status if something is worse than the baseline, or a submission is not valid."""
BASELINE = "Baseline"

SpecBench = Annotated[
    Path | None,
    typer.Option(help="Questions of Spec-Bench, JSON lines.", metavar="FILE", rich_help_panel=PROMPTS),
]
HumanEval = Annotated[
    Path | None, typer.Option(help="Tasks of HumanEval, JSON lines.", metavar="FILE", rich_help_panel=PROMPTS)
]
Shipped = Annotated[
    bool, typer.Option("--shipped/--no-shipped", help="Use the prompts of the package.", rich_help_panel=PROMPTS)
]
Submission = Annotated[
    Path | None,
    typer.Option(
        help="Submission, JSON. Measurements are kept beside it in a file .jsonl, and the same command continues an "
        "interrupted run.",
        metavar="FILE",
        rich_help_panel=OUTPUT,
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option(
        help="A stored submission; the exit status is 1 if a method is worse now.",
        metavar="FILE",
        rich_help_panel=BASELINE,
    ),
]
TokensTolerance = Annotated[
    float,
    typer.Option(help="Share by which tokens per pass may be lower.", metavar="X", rich_help_panel=BASELINE),
]
ScoreTolerance = Annotated[
    float,
    typer.Option(help="Share by which the speed over plain may be lower.", metavar="X", rich_help_panel=BASELINE),
]
Files = Annotated[list[Path], typer.Argument(help="Submissions.", metavar="FILE...", rich_help_panel="Arguments")]


@takes("execution", execution_of)
def suite(
    model: Model,
    *,
    draft: Drafts = None,
    plan: Plans = None,
    verify: Verify = "coupled",
    spec_bench: SpecBench = None,
    humaneval: HumanEval = None,
    shipped: Shipped = True,
    category: Category = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    repeats: Repeats = 1,
    execution: Execution,
    baseline: Baseline = None,
    tokens_tolerance: TokensTolerance = 0.02,
    score_tolerance: ScoreTolerance = 0.25,
    output: Submission = None,
) -> None:
    """Score methods on prompt sets, interleaved with plain decoding, for a submission that others can compare.

    Without --draft: lookups, and the trained head of the package if there is one. Ctrl-C loses nothing with --output:
    the same command continues.
    """
    require_new(output)
    from draftree.cli.progress import resolve_with_bar
    from draftree.lab.bench.suite.comparison import Tolerance, require_same_run
    from draftree.lab.bench.suite.run import SuiteSettings, prepare_suite, resumed
    from draftree.lab.bench.suite.submission import facts_of, read_submission

    tolerance = Tolerance(tokens_tolerance, score_tolerance)
    stored = None if baseline is None else read_submission(baseline)
    settings = SuiteSettings(
        model=model,
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
        **execution.values,
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
    csv: Annotated[
        bool, typer.Option("--csv", help="One line per submission, method and category.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Print a table of submissions as Markdown or CSV; submissions of other prompts or arguments are refused."""
    from draftree.lab.bench.suite.comparison import comparison, names_of, to_csv
    from draftree.lab.bench.suite.submission import read_submission

    found = {name: read_submission(path) for name, path in zip(names_of(files), files, strict=True)}
    typer.echo(to_csv(found) if csv else comparison(found), nl=False)


def sets_of(spec_bench: Path | None, humaneval: Path | None, *, shipped: bool) -> tuple[PromptSet, ...]:
    """Return the chosen prompt sets."""
    from draftree.lab.bench.suite.run import HUMANEVAL, SHIPPED_SET, SPEC_BENCH, PromptSet

    found = [PromptSet(SHIPPED_SET)] if shipped else []
    found += [PromptSet(SPEC_BENCH, spec_bench)] if spec_bench is not None else []
    found += [PromptSet(HUMANEVAL, humaneval)] if humaneval is not None else []
    return tuple(found)


def journal_of(output: Path) -> Path:
    """Return the file of measurements beside a submission.

    Raises:
        ConfigurationError: it would be the submission itself.
    """
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
    """Print the tables of one submission."""
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
    """Print what is worse than the baseline.

    Raises:
        typer.Exit: something is worse.
    """
    from draftree.lab.bench.suite.comparison import regressions

    found = regressions(submission, baseline, tolerance)
    for one in found:
        note(f"worse than the baseline: {one}")
    if found:
        raise typer.Exit(WORSE)
    typer.echo("nothing is worse than the baseline")
