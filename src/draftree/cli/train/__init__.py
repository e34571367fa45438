"""`draftree train`: training data of a target, and drafters trained on them."""

from __future__ import annotations

import typer

from draftree.cli.layout import PlainCommand, PlainGroup
from draftree.cli.train.block import block
from draftree.cli.train.boost import boost
from draftree.cli.train.data import data
from draftree.cli.train.distill import distill
from draftree.cli.train.export import export
from draftree.cli.train.head import head
from draftree.cli.train.prompts import prompts

__all__ = ["train"]

train = typer.Typer(cls=PlainGroup, no_args_is_help=True)


@train.callback()
def about() -> None:
    """Make training data from a target's own texts, and train drafters on them."""


for _name, _command in (
    ("prompts", prompts),
    ("data", data),
    ("head", head),
    ("block", block),
    ("distill", distill),
    ("boost", boost),
    ("export", export),
):
    train.command(_name, cls=PlainCommand)(_command)
