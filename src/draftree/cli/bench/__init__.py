"""`draftree bench`: benchmark commands and reports of their results."""

from __future__ import annotations

import typer

from draftree.cli.bench.options import DEFAULT_COMMAND, BenchGroup
from draftree.cli.bench.passes import passes
from draftree.cli.bench.perplexity import perplexity
from draftree.cli.bench.report import report, simulate
from draftree.cli.bench.run import run
from draftree.cli.bench.suite import suite, suite_check, suite_table
from draftree.cli.layout import PlainCommand

__all__ = ["bench"]

bench = typer.Typer(cls=BenchGroup, no_args_is_help=True)


@bench.callback()
def about() -> None:
    """Measure methods against plain decoding; 'bench MODEL' is short for 'bench run MODEL'."""


for _name, _command in (
    (DEFAULT_COMMAND, run),
    ("passes", passes),
    ("perplexity", perplexity),
    ("simulate", simulate),
    ("report", report),
    ("suite", suite),
    ("suite-check", suite_check),
    ("suite-table", suite_table),
):
    bench.command(_name, cls=PlainCommand)(_command)
