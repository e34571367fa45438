"""Options of commands whose model may be divided among the processes that torchrun started."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.options import RUNNING
from draftree.parallel.options import ParallelOptions

__all__ = ["parallel_of"]

TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp",
        help="Processes of torchrun that share each layer (tensor parallel).",
        metavar="N",
        rich_help_panel=RUNNING,
    ),
]
PipelineParallel = Annotated[
    int,
    typer.Option(
        "--pp",
        help="Stages of layers (pipeline parallel); each has --tp processes.",
        metavar="N",
        rich_help_panel=RUNNING,
    ),
]
StrictSums = Annotated[
    bool,
    typer.Option(
        "--strict-sums",
        help="Add the partial sums of processes in one order, whatever else is in a pass.",
        rich_help_panel=RUNNING,
    ),
]


def parallel_of(
    *, tp: TensorParallel = 1, pp: PipelineParallel = 1, strict_sums: StrictSums = False
) -> ParallelOptions:
    """Return the options of a command.

    Raises:
        ConfigurationError: a size is below 1, or there are no sums to order.
    """
    return ParallelOptions(tp=tp, pp=pp, strict_sums=strict_sums)
