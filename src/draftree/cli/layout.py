"""How help looks: options in titled groups, examples kept line by line."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["PlainCommand", "PlainGroup"]

WHOLE = 1000
"""Characters of a summary: more than any has."""


class PlainCommand(TyperCommand):
    """A command whose options stand under the titles that they were given."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One section for each title, in order of appearance; --help comes last."""
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
        """The epilog's lines as they are."""
        write_examples(self.epilog, formatter)


class PlainGroup(TyperGroup):
    """A group of commands with whole summaries, and examples below."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Names and summaries, none cut off."""
        rows = [
            (name, command.get_short_help_str(limit=WHOLE))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The epilog's lines as they are."""
        write_examples(self.epilog, formatter)


def write_examples(epilog: str | None, formatter: Any) -> None:
    if epilog:
        with formatter.section("Examples"):
            for line in epilog.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
