"""`draftree bench`: methods against plain decoding and transformers, with what a number needs beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftree.cli.layout import PlainCommand, PlainGroup
from draftree.core.errors import ConfigurationError

if TYPE_CHECKING:
    from draftree.bench.benchmark import Benchmark, BenchSettings
    from draftree.bench.records import RecordFile, Results

__all__ = ["bench"]

COMPARED = "What is compared"
PROMPTS = "On what"
HOW = "How"
INTERRUPTED = 130
WIDTH = 160
DEFAULT_COMMAND = "run"


class BenchGroup(PlainGroup):
    """`draftree bench MODEL` is `draftree bench run MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's name where it was left out."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(cls=BenchGroup, no_args_is_help=True)

Model = Annotated[
    str,
    typer.Argument(
        help="A name of 'draftree models', a folder, a GGUF file or a hub id.",
        metavar="MODEL",
        rich_help_panel="Arguments",
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16, float16 or float64.", metavar="NAME", rich_help_panel=HOW)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", metavar="NAME", rich_help_panel=HOW)]
Kernels = Annotated[
    str, typer.Option(help="What computes passes: auto, native, torch or graphs.", metavar="NAME", rich_help_panel=HOW)
]
Quantization = Annotated[
    str | None,
    typer.Option(help="int8 for weights of 8 bits; as they come if not given.", metavar="NAME", rich_help_panel=HOW),
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of torch; its own choice if not given.", metavar="N", rich_help_panel=HOW)
]
Output = Annotated[
    Path | None,
    typer.Option(help="JSON lines: provenance, then every single measurement.", metavar="FILE", rich_help_panel=HOW),
]


@bench.callback()
def about() -> None:
    """Measure methods against plain decoding; 'bench MODEL' is short for 'bench run MODEL'."""


@bench.command(DEFAULT_COMMAND, cls=PlainCommand)
def run(
    model: Model,
    *,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="A method beside plain decoding: ngram, model:NAME,k=4; a planner or verifier of its own behind @ "
            "(ngram@heuristic, model:NAME@fixed:4@token); repeatable.",
            metavar="SPEC[@PLAN][@VERIFY]",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            help="Planner of every draft that names none; repeatable, each makes a method.",
            metavar="POLICY",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    verify: Annotated[
        str, typer.Option(help="Rule of every method that names none.", metavar="RULE", rich_help_panel=COMPARED)
    ] = "coupled",
    peer: Annotated[
        bool,
        typer.Option(
            "--peer/--no-peer", help="The same jobs done by transformers, in turns.", rich_help_panel=COMPARED
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with 'prompt' or 'messages' and 'category', Spec-Bench or HumanEval; "
            "a small set of our own if not given.",
            metavar="FILE",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(help="Only prompts of this category; repeatable.", metavar="NAME", rich_help_panel=PROMPTS),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each category at most.", metavar="N", rich_help_panel=PROMPTS)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a text at most.", metavar="N", rich_help_panel=HOW)] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token.", metavar="X", rich_help_panel=HOW)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every text.", metavar="N", rich_help_panel=HOW)] = 0,
    repeats: Annotated[int, typer.Option(help="How often each text is written.", metavar="N", rich_help_panel=HOW)] = 3,
    batch: Annotated[int, typer.Option(help="Prompts that are written at once.", metavar="N", rich_help_panel=HOW)] = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    quantization: Quantization = None,
    threads: Threads = None,
    output: Output = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="A folder for a trace of each drafting method, for 'bench simulate'.",
            metavar="DIR",
            rich_help_panel=HOW,
        ),
    ] = None,
) -> None:
    """Write every prompt by every method, in turns, and compare."""
    require_new(output)
    if record is not None and record.exists():
        raise ConfigurationError(f"'{record}' is there already, and traces are never overwritten: give another name")
    from draftree.bench.benchmark import BenchSettings

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
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantization=quantization,
        threads=threads,
        batch=batch,
        peer=peer,
    )
    run_and_show(settings, output, record)


@bench.command("passes", cls=PlainCommand)
def passes(
    model: Model,
    *,
    rows: Annotated[
        str, typer.Option(help="Tokens in a pass.", metavar="N,N,...", rich_help_panel=COMPARED)
    ] = "1,2,4,8,16,32,64",
    prefix: Annotated[int, typer.Option(help="Tokens before the pass.", metavar="N", rich_help_panel=COMPARED)] = 256,
    trees: Annotated[
        str | None,
        typer.Option(
            help="Trees to score, as trees, leaf by leaf, and beside a chain of as many tokens: 2-2-2,4-2-1.",
            metavar="SHAPE,...",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    drafts: Annotated[
        str | None,
        typer.Option(
            help="Trees that the model drafts, and the passes in it: 1-1-1,best-32.",
            metavar="SHAPE,...",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Passes of each kind.", metavar="N", rich_help_panel=HOW)] = 20,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    quantization: Quantization = None,
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Time passes of a model over more and more tokens, beside the floor that memory sets."""
    require_new(output)
    try:
        counts = tuple(int(count) for count in rows.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"'{rows}' is no list of whole numbers such as 1,2,4", param_hint="--rows") from error
    from draftree.bench.benchmark import end_line
    from draftree.bench.passes import PassSettings, measure
    from draftree.cli.models import resolve_with_bar

    settings = PassSettings(
        model=model,
        rows=counts,
        prefix=prefix,
        repeats=repeats,
        trees=tuple(trees.split(",") if trees else ()),
        drafts=tuple(drafts.split(",") if drafts else ()),
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantization=quantization,
        threads=threads,
    )
    header, records, tree_records = measure(settings, fetch=resolve_with_bar)
    with record_file(output) as lines:
        lines.add("header", header)
        for record in records:
            lines.add("pass", record)
        for tree in tree_records:
            lines.add("tree", tree)
        lines.add("end", end_line(complete=True))
    show_results(lines.results("this run"))


@bench.command("laws", cls=PlainCommand)
def laws(
    model: Model,
    *,
    draft_model: Annotated[str, typer.Option(help="The drafter's model.", metavar="NAME", rich_help_panel=COMPARED)],
    temperatures: Annotated[
        str, typer.Option(help="Of texts and laws.", metavar="X,X,...", rich_help_panel=COMPARED)
    ] = "0,0.5,0.8,1,1.25,1.5",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, as for 'bench run'; our own if not given.", metavar="FILE", rich_help_panel=PROMPTS
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(help="Only prompts of this category; repeatable.", metavar="NAME", rich_help_panel=PROMPTS),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each category at most.", metavar="N", rich_help_panel=PROMPTS)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a text at most.", metavar="N", rich_help_panel=HOW)] = 48,
    seed: Annotated[int, typer.Option(help="Of every text.", metavar="N", rich_help_panel=HOW)] = 0,
    draws: Annotated[int, typer.Option(help="Noises that are averaged over.", metavar="N", rich_help_panel=HOW)] = 8,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Compare a drafter's laws with the target's: how often it guesses right, and what each rule keeps."""
    require_new(output)
    from draftree.analysis.laws import kept_by_rule
    from draftree.bench.benchmark import end_line
    from draftree.bench.laws import LawSettings, prepare
    from draftree.cli.models import resolve_with_bar

    settings = LawSettings(
        model=model,
        draft_model=draft_model,
        temperatures=numbers_of(temperatures),
        prompts=prompts,
        categories=tuple(category or ()),
        limit=limit,
        max_tokens=max_tokens,
        seed=seed,
        draws=draws,
        dtype=dtype,
        device=device,
        threads=threads,
    )
    ready = prepare(settings, fetch=resolve_with_bar)
    with record_file(output) as lines:
        lines.add("header", ready.header)
        for records in ready.run(kept_by_rule):
            for record in records:
                lines.add("law", record)
        lines.add("end", end_line(complete=True))
    show_results(lines.results("this run"))


@bench.command("perplexity", cls=PlainCommand)
def perplexity(
    model: Model,
    *,
    text: Annotated[Path, typer.Option(help="A file of UTF-8 text.", metavar="FILE", rich_help_panel=PROMPTS)],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="auto, float32, bfloat16, float16, float64 or int8; repeatable, and then compared with the first.",
            metavar="KIND",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    window: Annotated[
        int, typer.Option(help="Tokens that are read at once at most.", metavar="N", rich_help_panel=HOW)
    ] = 1024,
    limit: Annotated[
        int | None, typer.Option(help="Tokens of the text at most.", metavar="N", rich_help_panel=PROMPTS)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of keys and values beside int8 weights.", metavar="NAME", rich_help_panel=HOW)
    ] = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Read a text, and say how well it was foretold; with several kinds of weights, what the others lose."""
    require_new(output)
    from draftree.bench.benchmark import end_line
    from draftree.bench.perplexity import PerplexitySettings, measure
    from draftree.cli.models import resolve_with_bar

    settings = PerplexitySettings(
        model=model,
        text=text,
        weights=tuple(weights or ("auto",)),
        window=window,
        limit=limit,
        dtype=dtype,
        device=device,
        kernels=kernels,
        threads=threads,
    )
    header, records = measure(settings, fetch=resolve_with_bar)
    with record_file(output) as lines:
        lines.add("header", header)
        for record in records:
            lines.add("perplexity", record)
        lines.add("end", end_line(complete=True))
    show_results(lines.results("this run"))


def numbers_of(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"'{text}' is no list of numbers such as 0,0.8", param_hint="--temperatures"
        ) from error


@bench.command("simulate", cls=PlainCommand)
def simulate(
    trace: Annotated[
        Path,
        typer.Argument(help="What --record wrote.", metavar="TRACE", rich_help_panel="Arguments"),
    ],
    *,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            help="A planner to try; repeatable. Plain decoding always stands beside.",
            metavar="POLICY",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            help="Nodes a round for the bounds: what a planner that knew the text would accept.",
            metavar="N,N,...",
            rich_help_panel=COMPARED,
        ),
    ] = "1,2,4,8,16",
) -> None:
    """Replay a trace under other planners, without a model."""
    from draftree.analysis.replays import replays
    from draftree.analysis.trace import read_trace

    try:
        counts = tuple(int(count) for count in sizes.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"'{sizes}' is no list of whole numbers such as 1,4", param_hint="--sizes") from error
    typer.echo(replays(read_trace(trace), plans=tuple(plan or ("auto", "fixed")), sizes=counts))


@bench.command("report", cls=PlainCommand)
def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Results that --output wrote.", metavar="FILE...", rich_help_panel="Arguments"),
    ],
    *,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Tables for a document.", rich_help_panel="Output")
    ] = False,
    together: Annotated[
        bool, typer.Option("--together", help="One table of all runs, side by side.", rich_help_panel="Output")
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="A folder for plots of all that the files hold together, in place of tables; needs the extra 'plots'.",
            metavar="DIR",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Print the tables of results files, or draw them."""
    from draftree.bench.records import read_results
    from draftree.bench.tables import markdown as as_markdown

    if plots is not None:
        from draftree.bench.plots import draw_all

        for path in draw_all([read_results(path) for path in files], plots):
            typer.echo(path)
        return
    if together:
        from draftree.bench.tables import together_grid

        typer.echo(together_grid([read_results(path) for path in files]).markdown())
        return
    for number, results in enumerate([read_results(path) for path in files]):
        if number:
            typer.echo()
        if markdown:
            typer.echo(f"### {results.name}\n\n{as_markdown(results)}", nl=False)
        else:
            typer.echo(results.name)
            show_results(results)


def run_and_show(settings: BenchSettings, output: Path | None, record: Path | None) -> None:
    from draftree.bench.benchmark import end_line, prepare
    from draftree.cli.models import resolve_with_bar
    from draftree.cli.recording import Recordings

    complete = False
    with Recordings(record) as traces, record_file(output) as lines:
        ready = prepare(settings, fetch=resolve_with_bar, on_round=traces.of)
        traces.begin(ready, settings.model)
        lines.add("header", ready.header)
        try:
            write_all(ready, lines)
            complete = True
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: prompts that were not done by all methods are left out\n")
        lines.add("end", end_line(complete=complete))
    results = lines.results("this run")
    if results.records:
        show_results(results)
    if not complete:
        raise typer.Exit(INTERRUPTED)


def write_all(ready: Benchmark, lines: RecordFile) -> None:
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(len(group) for group in ready.groups))
        for group, records in zip(ready.groups, ready.run(), strict=True):
            for record in records:
                lines.add("record", record)
            bar.advance(task, len(group))


def show_results(results: Results) -> None:
    from draftree.bench.tables import show

    console = Console()
    # a file or a pipe has no width: tables are not to be cut there
    show(results, console if console.is_terminal else Console(width=WIDTH))


def require_new(output: Path | None) -> None:
    """Refuses a results file that can not be written, before anything is loaded or measured."""
    if output is None:
        return
    if output.exists():
        raise ConfigurationError(f"'{output}' is there already, and results are never overwritten: give another name")
    if not output.absolute().parent.is_dir() or not os.access(output.absolute().parent, os.W_OK):
        raise ConfigurationError(f"'{output}' can not be written: its folder is not there, or is not yours to write")


@contextmanager
def record_file(output: Path | None) -> Iterator[RecordFile]:
    from draftree.bench.records import RecordFile

    if output is None:
        yield RecordFile(None)
        return
    with output.open("x", encoding="utf-8") as stream:
        yield RecordFile(stream)
