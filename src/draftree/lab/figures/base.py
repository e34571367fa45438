"""Base of all figures: their material, what they need, their numbers, and their drawing. No torch, no matplotlib.

The material is traces by the run that they come from, and lines of results files.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from draftree.core.errors import ConfigurationError
from draftree.core.files import read_json_lines
from draftree.engine.trace import Trace

RUN = "run"
"""Name of the fact in a trace's header that says which run of `draftree analyse` it comes from."""


@dataclass(frozen=True, slots=True)
class Material:
    """What figures are made from: traces by run, and the lines of results files by name."""

    traces: Mapping[str, Sequence[Trace]] = field(default_factory=dict)
    results: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @classmethod
    def of(cls, traces: Iterable[Trace], results: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> Material:
        """Group traces by run."""
        grouped: dict[str, list[Trace]] = {}
        for trace in traces:
            grouped.setdefault(run_of(trace), []).append(trace)
        return cls(grouped, results or {})

    def one(self, run: str) -> Trace:
        """Return the trace of a run; the first of several."""
        return self.all(run)[0]

    def all(self, run: str) -> Sequence[Trace]:
        """Return the traces of a run."""
        if not (traces := self.traces.get(run, ())):
            raise ConfigurationError(f"there is no trace of the run '{run}': name a model, or a trace of it")
        return traces

    def lines(self, **fields: Any) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Return the lines of results files in which fields have these values, each with the header before it."""
        matching = []
        for lines in self.results.values():
            header = lines[0]
            for line in lines:
                header = line if line.get("kind") == "header" else header
                if all(line.get(name) == value for name, value in fields.items()):
                    matching.append((header, line))
        if not matching:
            wanted = ", ".join(f"{name} '{value}'" for name, value in fields.items())
            raise ConfigurationError(f"no results file has lines with {wanted}: name one with --results")
        return matching

    def has(self, runs: Iterable[str], results: Iterable[str]) -> bool:
        """Return whether there are traces of all runs, and results of all kinds."""
        kinds = {str(line.get("kind", line.get("part"))) for lines in self.results.values() for line in lines}
        return all(self.traces.get(run) for run in runs) and all(kind in kinds for kind in results)


def run_of(trace: Trace) -> str:
    """Return the run that a trace comes from; for one of another command the run with this planner."""
    tagged = trace.header.about.get(RUN)
    if isinstance(tagged, str):
        return tagged
    planner = re.split("[:,]", trace.header.plan)[0]
    return planner if planner in ("watch", "adaptive") else "fixed"


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Read a results file as its lines."""
    try:
        lines: list[Mapping[str, Any]] = [*read_json_lines(path)]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"results file '{path}' cannot be read: {error}") from error
    if not lines:
        raise ConfigurationError(f"results file '{path}' has no JSON objects: name a file of benchmarks/results")
    return lines


@dataclass(frozen=True, slots=True)
class Data:
    """The numbers of a figure.

    Attributes:
        rows: rows of its CSV file, all with the same names.
        measured: what was measured on what, for the line below the title.
        losing: a case of the same data in which the method loses.
        extra: anything else that the drawing needs, derived from the same material.
    """

    rows: Sequence[Mapping[str, Any]]
    measured: str
    losing: str
    extra: Any = None


class Figure(ABC):
    """One figure. Subclasses have no state.

    Attributes:
        title: title of the figure.
        runs: runs of a model that its data come from, by name (`runs_of` in `runs`); all are needed.
        results: kinds of results files that its data come from.
        size: width and height in inches.
    """

    title: ClassVar[str]
    runs: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[str, ...]] = ()
    size: ClassVar[tuple[float, float]] = (6.8, 4.6)

    def __init_subclass__(cls) -> None:
        FIGURES["-".join(re.findall("[A-Z][a-z]*", cls.__name__)).lower()] = cls

    @abstractmethod
    def data(self, material: Material) -> Data:
        """Return the numbers.

        Raises:
            ConfigurationError: the material has no data for this figure.
        """

    @abstractmethod
    def draw(self, figure: Any, data: Data) -> None:
        """Draw the data into a figure of matplotlib, without title and notes."""


FIGURES: dict[str, type[Figure]] = {}
"""The figures of `gallery` by name, once it is imported."""
