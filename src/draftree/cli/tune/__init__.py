"""`draftree tune`: search by measurement for what makes a model fast on this machine."""

from __future__ import annotations

from typing import Any

import typer

from draftree.cli.layout import PlainCommand, PlainGroup
from draftree.cli.tune.drafts import drafts
from draftree.cli.tune.layers import layers

__all__ = ["tune"]

DEFAULT = "drafts"
"""The command of `draftree tune MODEL`."""
HELP = ("--help", "-h")


class TuneGroup(PlainGroup):
    """Group in which a model in the place of a command means the default command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with the name of the default command before a model or an option."""
        is_named = not args or args[0] in (*self.commands, *HELP)
        return super().parse_args(ctx, args if is_named else [DEFAULT, *args])


tune = typer.Typer(cls=TuneGroup, no_args_is_help=True)


@tune.callback()
def about() -> None:
    """Measure on this machine what makes a model fast, and keep the result.

    'draftree tune MODEL' is 'draftree tune drafts MODEL'.
    """


for _name, _command in ((DEFAULT, drafts), ("layers", layers)):
    tune.command(_name, cls=PlainCommand)(_command)
