"""`draftree bench passes`."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.bench.options import COMPARED, HOW, Output, listed, write_and_show
from draftree.cli.made import takes
from draftree.cli.options import Model, require_new
from draftree.cli.running import Execution, execution_of


@takes("execution", execution_of)
def passes(
    model: Model,
    *,
    rows: Annotated[
        str, typer.Option(help="Numbers of tokens per pass.", metavar="N,N,...", rich_help_panel=COMPARED)
    ] = "1,2,4,8,16,32,64",
    prefix: Annotated[
        int | None,
        typer.Option(
            help="Tokens before the pass; if not given, 256, or as many as fit into a shorter context.",
            metavar="N",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Passes of each kind.", metavar="N", rich_help_panel=HOW)] = 20,
    execution: Execution,
    output: Output = None,
) -> None:
    """Time passes of a model by number of tokens, with the lower bound from memory bandwidth."""
    require_new(output)
    counts = listed(rows, "--rows", kind=int, example="1,2,4")
    from draftree.cli.progress import resolve_with_bar
    from draftree.lab.bench.passes import PassSettings, measure

    settings = PassSettings(
        model=model,
        rows=counts,
        prefix=prefix,
        repeats=repeats,
        **execution.values,
    )
    header, records = measure(settings, fetch=resolve_with_bar)
    write_and_show(output, header, (("pass", record) for record in records))
