"""`draftree bench simulate` and `draftree bench report`: evaluation of existing results and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.bench.options import COMPARED, listed, show_results
from draftree.cli.completion import complete_plan
from draftree.core.errors import ConfigurationError, require_extra


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(help="A trace from --record.", metavar="TRACE", rich_help_panel="Arguments"),
    ],
    *,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            help="A planner to simulate; repeatable. Plain decoding is always included.",
            metavar="POLICY",
            autocompletion=complete_plan,
            rich_help_panel=COMPARED,
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            help="Nodes per round for the bounds, which assume a planner with knowledge of the text.",
            metavar="N,N,...",
            rich_help_panel=COMPARED,
        ),
    ] = "1,2,4,8,16",
) -> None:
    """Replay a trace under other planners, without a model."""
    from draftree.engine.trace import read_trace
    from draftree.lab.analysis.simulation import replays

    counts = listed(sizes, "--sizes", kind=int, example="1,4")
    typer.echo(replays(read_trace(trace), plans=tuple(plan or ("adaptive", "fixed")), sizes=counts))


def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Results files from --output.", metavar="FILE...", rich_help_panel="Arguments"),
    ],
    *,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Tables for a document.", rich_help_panel="Output")
    ] = False,
    together: Annotated[
        bool, typer.Option("--together", help="One table with all runs side by side.", rich_help_panel="Output")
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="A folder for figures (SVG, PNG, PDF) instead of tables; needs the extra 'plots'.",
            metavar="DIR",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Print the tables of results files, or plot them."""
    from draftree.lab.bench.records import read_results
    from draftree.lab.bench.tables import markdown as as_markdown

    if plots is not None:
        from draftree.lab.figures.results import draw_all

        require_extra("plots", "--plots needs", error=ConfigurationError)
        for path in draw_all([read_results(path) for path in files], plots):
            typer.echo(path)
        return
    if together:
        from draftree.lab.bench.tables import together_grid

        typer.echo(together_grid([read_results(path) for path in files]).markdown())
        return
    for number, results in enumerate([read_results(path) for path in files]):
        if number:
            typer.echo()
        if markdown:
            typer.echo(f"### {results.name}\n\n{as_markdown(results)}", nl=False)
        else:
            typer.echo(results.name)
            show_results(results)
