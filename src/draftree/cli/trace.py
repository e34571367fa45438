"""`draftree trace`: traces of `--record` as summaries, timelines, tables and pages."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from draftree.cli.layout import OUTPUT, argument, group_of, option
from draftree.cli.options import AS_JSON, require_new
from draftree.core.errors import ConfigurationError


class To(StrEnum):
    CHROME = "chrome"
    CSV = "csv"


TRACE: Any = argument(..., "A trace from --record.", "TRACE")
WRITTEN: Any = option(..., "The file to write.", "FILE", OUTPUT)


def show(
    file: Path = TRACE,
    *,
    as_json: bool = AS_JSON,
) -> None:
    """Print what a trace holds: the run, its rounds, tokens per round and seconds by phase."""
    from draftree.engine.trace import read_trace
    from draftree.lab.analysis.export import summary

    facts = summary(read_trace(file))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{name.replace('_', ' '):<18}{shown}")


def export(
    file: Path = TRACE,
    *,
    to: To = option(
        To.CHROME, "chrome: trace events for Perfetto and chrome://tracing; csv: a table.", "FORMAT", OUTPUT
    ),
    table: str | None = option(
        None,
        "Table of a CSV file: rounds, steps (per sequence and round) or nodes (per drafted token).",
        "NAME",
        OUTPUT,
    ),
    output: Path = WRITTEN,
) -> None:
    """Convert a trace to a timeline or a table."""
    if table is not None and to is not To.CSV:
        raise typer.BadParameter("a table is for --to csv: leave it out, or add --to csv", param_hint="--table")
    require_new(output)
    from draftree.engine.trace import read_trace

    trace = read_trace(file)
    if to is To.CHROME:
        from draftree.lab.analysis.export import chrome_events

        output.write_text(json.dumps(chrome_events(trace), separators=(",", ":")), encoding="utf-8")
        return
    from draftree.engine.trace import TABLES, write_csv

    if table is not None and table not in TABLES:
        raise ConfigurationError(f"there is no table '{table}' of a trace: choose one of {', '.join(TABLES)}")
    with output.open("x", encoding="utf-8", newline="") as stream:
        write_csv(trace, table or "rounds", stream)


def page(file: Path = TRACE, *, output: Path = WRITTEN) -> None:
    """Write the playground: one page that shows the trace round by round, without a network."""
    require_new(output)
    from draftree.lab.figures.playground import page_of

    output.write_text(page_of(file), encoding="utf-8")


trace = group_of(
    "Summarize traces of --record, and convert them to timelines, tables and a page.",
    {"show": show, "export": export, "page": page},
)
