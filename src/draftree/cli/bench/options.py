"""What the commands of `draftree bench` have in common: the group, the options, the files they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from draftree.cli.layout import PlainGroup
from draftree.cli.render import note

if TYPE_CHECKING:
    from draftree.bench.records import RecordFile, Results

COMPARED = "What is compared"
PROMPTS = "On what"
HOW = "How"
WIDTH = 160
DEFAULT_COMMAND = "run"

Number = TypeVar("Number", int, float)


class BenchGroup(PlainGroup):
    """`draftree bench MODEL` is `draftree bench run MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's name where it was left out."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


Output = Annotated[
    Path | None,
    typer.Option(help="JSON lines: provenance, then every single measurement.", metavar="FILE", rich_help_panel=HOW),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with 'prompt' or 'messages' and 'category', Spec-Bench or HumanEval; "
        "a small set of our own if not given.",
        metavar="FILE",
        rich_help_panel=PROMPTS,
    ),
]
Category = Annotated[
    list[str] | None,
    typer.Option(help="Only prompts of this category; repeatable.", metavar="NAME", rich_help_panel=PROMPTS),
]
Limit = Annotated[
    int | None, typer.Option(help="Prompts of each category at most.", metavar="N", rich_help_panel=PROMPTS)
]
MaxTokens = Annotated[int, typer.Option(help="Tokens of a text at most.", metavar="N", rich_help_panel=HOW)]
Seed = Annotated[int, typer.Option(help="Of every text.", metavar="N", rich_help_panel=HOW)]


def listed(text: str, option: str, *, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    """The numbers that stand between commas.

    Raises:
        typer.BadParameter: something else stands there.
    """
    try:
        return tuple(kind(number) for number in text.split(","))
    except ValueError as error:
        named = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"'{text}' is no list of {named} such as {example}", param_hint=option) from error


def write_and_show(output: Path | None, header: Any, lines_of: Iterable[tuple[str, Any]]) -> None:
    """Write results line by line as they come, then print their tables.

    Args:
        output: the file; None: only print.
        header: the provenance.
        lines_of: the kind of each line, and the line.
    """
    from draftree.bench.benchmark import end_line

    with record_file(output) as lines:
        lines.add("header", header)
        note_kernels(header)
        for kind, record in lines_of:
            lines.add(kind, record)
        lines.add("end", end_line(complete=True))
    show_results(lines.results("this run"))


def note_kernels(header: Mapping[str, Any]) -> None:
    """Say on standard error why passes do not run in C, where that was possible."""
    if header.get("kernels_reason") is not None and header.get("device") == "cpu":
        note(f"kernels: {header['kernels']} ({header['kernels_reason']})")


def show_results(results: Results) -> None:
    """Print the tables of results; where they do not go to a terminal, as wide as they are."""
    from draftree.bench.tables import show

    console = Console()
    # a file or a pipe has no width: tables are not to be cut there
    show(results, console if console.is_terminal else Console(width=WIDTH))


@contextmanager
def record_file(output: Path | None) -> Iterator[RecordFile]:
    """A new results file; without a name, its lines are only kept."""
    from draftree.bench.records import RecordFile

    if output is None:
        yield RecordFile(None)
        return
    with output.open("x", encoding="utf-8") as stream:
        yield RecordFile(stream)
