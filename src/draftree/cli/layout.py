"""Shared behaviour of all commands: repeated options are refused, help has titled groups, examples keep their lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["PlainCommand", "PlainGroup"]

WHOLE = 1000
"""Longer than any summary."""


class PlainCommand(TyperCommand):
    """A command whose options are listed under their titles."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, but refuse repeated options."""
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each title, in order of appearance; --help is last."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                # the --help option is not typer's own and has no title
                title = getattr(parameter, "rich_help_panel", None) or "Other options"
                panels.setdefault(title, []).append(record)
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the lines of the epilog unchanged."""
        write_examples(self.epilog, formatter)


class PlainGroup(TyperGroup):
    """A group of commands with complete summaries and examples."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, but refuse repeated options."""
        refuse_repeated(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write names and summaries without truncation."""
        rows = [
            (name, command.get_short_help_str(limit=WHOLE))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the lines of the epilog unchanged."""
        write_examples(self.epilog, formatter)


def refuse_repeated(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Refuse a repeated single-value option, of which the parser would silently keep the last value.

    Raises:
        typer.BadParameter: an option is repeated.
    """
    if ctx.resilient_parsing:
        return
    _, _, given = command.make_parser(ctx).parse_args(args=list(args))
    for parameter, count in Counter(given).items():
        holds_one = parameter.param_type_name == "option" and not parameter.multiple and not parameter.is_eager
        if holds_one and count > 1:
            raise typer.BadParameter(f"it is given {count} times: give it once", ctx=ctx, param=parameter)


def write_examples(epilog: str | None, formatter: Any) -> None:
    if epilog:
        with formatter.section("Examples"):
            for line in epilog.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
