"""`draftree bench run`: methods compared with plain decoding and transformers, with provenance."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftree.cli.bench.options import (
    COMPARED,
    HOW,
    Category,
    Drafts,
    Limit,
    MaxTokens,
    Output,
    Plans,
    Prompts,
    Repeats,
    Seed,
    Temperature,
    Verify,
    note_kernels,
    record_file,
    show_results,
)
from draftree.cli.dividing import parallel_of
from draftree.cli.made import takes
from draftree.cli.options import Model, require_new
from draftree.cli.running import Execution, execution_of
from draftree.core.errors import ConfigurationError
from draftree.parallel.entry import leave_to_rank_zero
from draftree.parallel.options import ParallelOptions

if TYPE_CHECKING:
    from draftree.lab.bench.benchmark import Benchmark, BenchSettings
    from draftree.lab.bench.records import Record as BenchRecord
    from draftree.lab.bench.records import RecordFile
    from draftree.lab.bench.workload import Prompt

INTERRUPTED = 130

Peer = Annotated[
    bool,
    typer.Option(
        "--peer/--no-peer", help="Run the same jobs with transformers, interleaved.", rich_help_panel=COMPARED
    ),
]
Batch = Annotated[int, typer.Option(help="Number of concurrent prompts.", metavar="N", rich_help_panel=HOW)]
Record = Annotated[
    Path | None,
    typer.Option(
        help="A folder for a trace of each drafting method, for 'bench simulate'.", metavar="DIR", rich_help_panel=HOW
    ),
]


@takes("execution", execution_of)
@takes("parallel", parallel_of)
def run(
    model: Model,
    *,
    draft: Drafts = None,
    plan: Plans = None,
    verify: Verify = "coupled",
    peer: Peer = False,
    prompts: Prompts = None,
    category: Category = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    repeats: Repeats = 3,
    batch: Batch = 1,
    execution: Execution,
    parallel: ParallelOptions,
    output: Output = None,
    record: Record = None,
) -> None:
    """Run every prompt with every method, interleaved, and compare the speeds."""
    leave_to_rank_zero(model, parallel, execution.loading, threads=execution.threads)
    require_new(output)
    if record is not None and record.exists():
        raise ConfigurationError(f"'{record}' already exists, and traces are never overwritten: choose another path")
    from draftree.lab.bench.benchmark import BenchSettings

    settings = BenchSettings(
        model=model,
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
        **execution.values,
        parallel=parallel,
        batch=batch,
        peer=peer,
    )
    run_and_show(settings, output, record)


def run_and_show(settings: BenchSettings, output: Path | None, record: Path | None) -> None:
    """Measure, write the results and print their tables; Ctrl-C keeps complete prompts."""
    from draftree.cli.progress import resolve_with_bar
    from draftree.cli.recording import Recordings
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
            traces.begin(ready, settings.model)
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
    """Measure every prompt with every method, with a progress bar.

    Args:
        ready: the benchmark.
        lines: where the records are written.
        groups: groups that are left; None for all.
        records: their records, measured when they are read; None for those of the benchmark.
    """
    groups = ready.groups if groups is None else groups
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(len(group) for group in groups))
        for group, found in zip(groups, records or ready.run(), strict=True):
            for record in found:
                lines.add("record", record)
            bar.advance(task, len(group))
