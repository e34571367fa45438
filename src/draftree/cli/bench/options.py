"""Shared parts of the commands of `draftree bench`: the group, the options, the results files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from draftree.cli.completion import complete_draft, complete_plan, complete_verify
from draftree.cli.layout import PlainGroup
from draftree.cli.render import note

if TYPE_CHECKING:
    from draftree.lab.bench.records import RecordFile, Results

COMPARED = "Methods"
PROMPTS = "Prompts"
HOW = "Measurement"
WIDTH = 160
DEFAULT_COMMAND = "run"

Number = TypeVar("Number", int, float)


class BenchGroup(PlainGroup):
    """`draftree bench MODEL` is `draftree bench run MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command's name if none is given."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


Output = Annotated[
    Path | None,
    typer.Option(
        help="Results file, JSON lines: provenance, then every measurement.", metavar="FILE", rich_help_panel=HOW
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with 'prompt' or 'messages' and 'category', Spec-Bench or HumanEval; "
        "a small built-in set if not given.",
        metavar="FILE",
        rich_help_panel=PROMPTS,
    ),
]
Category = Annotated[
    list[str] | None,
    typer.Option(help="Only prompts of this category; repeatable.", metavar="NAME", rich_help_panel=PROMPTS),
]
Limit = Annotated[
    int | None, typer.Option(help="Maximum number of prompts per category.", metavar="N", rich_help_panel=PROMPTS)
]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens per text.", metavar="N", rich_help_panel=HOW)]
Seed = Annotated[int, typer.Option(help="Seed of every text.", metavar="N", rich_help_panel=HOW)]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.", metavar="X", rich_help_panel=HOW)]
Repeats = Annotated[int, typer.Option(help="Number of repetitions of each text.", metavar="N", rich_help_panel=HOW)]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        help="A method besides plain decoding: ngram, model:NAME,k=4; its own planner or verifier after @ "
        "(ngram@heuristic, model:NAME@fixed:4@token); repeatable.",
        metavar="SPEC[@PLAN][@VERIFY]",
        autocompletion=complete_draft,
        rich_help_panel=COMPARED,
    ),
]
Plans = Annotated[
    list[str] | None,
    typer.Option(
        help="Planner of every method without its own; repeatable, one method per planner.",
        metavar="POLICY",
        autocompletion=complete_plan,
        rich_help_panel=COMPARED,
    ),
]
Verify = Annotated[
    str,
    typer.Option(
        help="Verifier of every method without its own.",
        metavar="RULE",
        autocompletion=complete_verify,
        rich_help_panel=COMPARED,
    ),
]


def listed(text: str, option: str, *, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """Parse comma-separated numbers.

    Raises:
        typer.BadParameter: a part is not a number.
    """
    try:
        return tuple(kind(number) for number in text.split(","))
    except ValueError as error:
        named = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"'{text}' is not a list of {named} such as {example}", param_hint=option) from error


def write_and_show(output: Path | None, header: Any, lines_of: Iterable[tuple[str, Any]]) -> None:
    """Write results line by line, then print their tables.

    Args:
        output: the results file; None prints only.
        header: the provenance.
        lines_of: pairs of the kind of a line and its record.
    """
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
    if header.get("kernels_reason") is not None and header.get("device") == "cpu":
        note(f"kernels: {header['kernels']} ({header['kernels_reason']})")


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
