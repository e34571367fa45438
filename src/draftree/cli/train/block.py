"""`draftree train block`: a head that drafts several tokens in one pass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.made import takes
from draftree.cli.render import note
from draftree.cli.train.shared import HEAD, Run, head_of, run_of, say_head, train
from draftree.cli.train.showing import Lines

if TYPE_CHECKING:
    from draftree.train.head import HeadOptions

__all__ = ["block"]

OF_UNROLLS = {"levels": 1, "levels_from": 0.0}
"""Options of multi-step training: a block has all its levels in one pass, and all are trained."""
OF_EAGLE = {"fc_norm": False, "norm_output": False}


@takes("run", run_of, fixed=OF_UNROLLS)
@takes("chosen", head_of, fixed=OF_EAGLE, layers=2)
def block(
    *,
    run: Run,
    chosen: HeadOptions,
    markov_rank: Annotated[
        int | None,
        typer.Option(
            help="Rank of the bias by the token before, 0 for none; 64 for a new head if not given.",
            metavar="N",
            rich_help_panel=HEAD,
        ),
    ] = None,
) -> None:
    """Train a DSpark-type head, whose blocks have as many tokens as --depth; '--draft head:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues.
    """
    from draftree.train.block import BlockOptions, train_block

    options = BlockOptions(chosen, markov_rank)
    settings = dataclasses.replace(run.settings, levels=run.settings.depth)
    result = train(run, lambda: train_block(run.job, settings, options, report=Lines(), note=note))
    say_head(run, result)
