"""Tables of a trace: per round, per sequence and round, per drafted token; as rows, CSV and pandas frames. No torch."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from draftree.analysis.export.chrome import starts_of
from draftree.analysis.trace import Step, Trace
from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.extras import import_extra
from draftree.core.tree import ROOT, depths

if TYPE_CHECKING:
    import pandas

__all__ = ["TABLES", "rows_of", "to_pandas", "write_csv"]


def to_pandas(trace: Trace, table: str) -> pandas.DataFrame:
    """Return a table as a data frame.

    Raises:
        ConfigurationError: there is no such table, or pandas is not installed.
    """
    found = rows_of(trace, table)
    frames = import_extra("pandas", "data frames need", error=ConfigurationError)
    frame: pandas.DataFrame = frames.DataFrame(list(found))
    return frame


def write_csv(trace: Trace, table: str, stream: IO[str]) -> None:
    """Write a table as CSV with a line of names.

    Raises:
        ConfigurationError: there is no such table.
    """
    found = list(rows_of(trace, table))
    writer = csv.DictWriter(stream, list(found[0]) if found else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)


def rows_of(trace: Trace, table: str) -> Iterator[Mapping[str, Any]]:
    """Return the rows of a table.

    Args:
        trace: the trace.
        table: one of `TABLES`.

    Raises:
        ConfigurationError: there is no such table.
    """
    if table not in TABLES:
        raise ConfigurationError(f"there is no table '{table}' of a trace: {suggestion(table, TABLES)}")
    return TABLES[table](trace)


def _rounds(trace: Trace) -> Iterator[dict[str, Any]]:
    for number, (one, start) in enumerate(zip(trace.rounds, starts_of(trace), strict=True)):
        yield {
            "round": number,
            "start": start,
            **{f"{name}_seconds": value for name, value in one.seconds.items()},
            "rows": one.num_rows,
            "sequences": len(one.steps),
            "drafted": sum(len(step.tree) for step in one.steps),
            "accepted": sum(len(step.path) for step in one.steps),
            "written": sum(step.num_written for step in one.steps),
        }


def _steps(trace: Trace) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(trace.rounds):
        for step in one.steps:
            yield {
                "round": number,
                "sequence": step.sequence,
                "prefix": step.prefix,
                "drafted": len(step.tree),
                "scored": len(step.scored),
                "depth": max(depths(step.tree.parents), default=0),
                "accepted": len(step.path),
                "written": step.num_written,
                "text": "".join(trace.text_of(token) for token in step.tokens[: step.num_written]),
            }


def _nodes(trace: Trace) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(trace.rounds):
        for step in one.steps:
            yield from ({"round": number, "sequence": step.sequence, **row} for row in _nodes_of(trace, step))


def _nodes_of(trace: Trace, step: Step) -> Iterator[dict[str, Any]]:
    tree, ranks = step.tree, [0] * (len(step.tree) + 1)
    scored = range(len(tree)) if step.kept is None else step.kept
    for node, depth in enumerate(depths(tree.parents)):
        parent = tree.parents[node]
        ranks[parent + 1] += 1
        score = tree.scores[node] if tree.scores else math.nan
        before = tree.scores[parent] if tree.scores and parent != ROOT else 0.0
        yield {
            "node": node,
            "parent": parent,
            "depth": depth,
            "rank": ranks[parent + 1],
            "token": tree.tokens[node],
            "text": trace.text_of(tree.tokens[node]),
            "score": score,
            "confidence": math.exp(min(0.0, score - before)) if tree.scores else math.nan,
            "sources": "+".join(tree.sources[node]) if tree.sources else "",
            "scored": node in scored,
            "accepted": node in step.path,
        }


TABLES: dict[str, Callable[[Trace], Iterator[dict[str, Any]]]] = {"rounds": _rounds, "steps": _steps, "nodes": _nodes}
