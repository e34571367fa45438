"""`draftree train distill`: a small whole model that drafts with the target's tokens."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from draftree.cli.made import takes
from draftree.cli.render import note
from draftree.cli.train import options as o
from draftree.cli.train.shared import Run, run_of, say_trained, say_use, train
from draftree.cli.train.showing import Lines

__all__ = ["distill"]

STUDENT = "Student"
OF_HEADS = {"levels": 1, "levels_from": 0.5, "level_decay": None}


@takes("run", run_of, fixed=OF_HEADS, learning_rate=6e-4, batch_tokens=1024)
def distill(
    *,
    run: Run,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start from this model; other tokens become the target's. A new one if not given.",
            metavar="MODEL",
            rich_help_panel=STUDENT,
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Width of a new one.", metavar="N", rich_help_panel=STUDENT)] = 256,
    layers: Annotated[int, typer.Option(help="Layers of a new one.", metavar="N", rich_help_panel=STUDENT)] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads of a new one.", metavar="N", rich_help_panel=STUDENT)] = 4,
    intermediate: Annotated[
        int | None,
        typer.Option(
            help="Inner width of its perceptrons; 8/3 of the width if not given.", metavar="N", rich_help_panel=STUDENT
        ),
    ] = None,
    kept_layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of the given model that stay, evenly spaced; all if not given.",
            metavar="N",
            rich_help_panel=STUDENT,
        ),
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay of matrices.", metavar="X", rich_help_panel=o.RECIPE)
    ] = 0.1,
) -> None:
    """Train a small model on the target's own texts; 'draftree generate MODEL --draft model:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues.
    """
    from draftree.train.distill import train_student
    from draftree.train.student import StudentOptions

    chosen = StudentOptions(start, hidden, layers, heads, intermediate, kept_layers)
    settings = dataclasses.replace(run.settings, weight_decay=weight_decay)
    result = train(run, lambda: train_student(run.job, settings, chosen, report=Lines(), note=note))
    say_trained(result)
    say_use(run, result.folder, f"model:{result.folder}")
