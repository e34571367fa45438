"""One command's work: choose figures, record the runs that they need, draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftree.analysis.trace import Trace, read_trace
from draftree.core.errors import ConfigurationError
from draftree.drafters import NO_DRAFT
from draftree.figures.base import FIGURES, Figure
from draftree.figures.drawing import write_figure
from draftree.figures.material import Material, read_lines

__all__ = ["Drawn", "chosen_figures", "draw_all", "material_of", "needed_runs"]


@dataclass(slots=True)
class Drawn:
    """What was drawn.

    Attributes:
        paths: written files.
        skipped: for every figure that was not drawn the reason.
    """

    paths: list[Path] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def chosen_figures(names: Sequence[str]) -> dict[str, Figure]:
    """Return figures by name; all without names.

    Raises:
        ConfigurationError: there is no such figure.
    """
    return {name: FIGURES.find(name)() for name in names or FIGURES.names()}


def needed_runs(figures: Mapping[str, Figure], material: Material) -> list[str]:
    """Return the runs that figures need and that the material lacks, for figures without missing results."""
    wanted = [run for one in figures.values() if material.has((), one.results) for run in one.runs]
    return [run for run in dict.fromkeys(wanted) if not material.traces.get(run)]


def material_of(traces: Iterable[Path], results: Iterable[Path]) -> Material:
    """Read traces and results files.

    Raises:
        ConfigurationError: a file cannot be read, or two results files have one name.
    """
    lines: dict[str, Sequence[Mapping[str, Any]]] = {}
    for path in results:
        if path.name in lines:
            raise ConfigurationError(f"two results files are named '{path.name}': leave one of them out")
        lines[path.name] = read_lines(path)
    return Material.of(map(read_trace, traces), lines)


def draw_all(
    figures: Mapping[str, Figure],
    material: Material,
    folder: Path,
    *,
    must: bool,
    refused: Mapping[str, str] | None = None,
    on_drawn: Callable[[str], object] = lambda name: None,
) -> Drawn:
    """Write the figures that the material has data for.

    Args:
        figures: by name.
        material: traces and results.
        folder: where the files are written.
        must: whether a figure without data is an error, because it was named.
        refused: for runs that could not be recorded the reason.
        on_drawn: called with the name of each written figure.

    Raises:
        ConfigurationError: matplotlib is missing, or a named figure has no data.
    """
    drawn = Drawn()
    for name, figure in figures.items():
        reasons = refused or {}
        missing = [reasons.get(run, run) for run in figure.runs if not material.traces.get(run)]
        missing += [f"results of kind '{kind}'" for kind in figure.results if not material.has((), (kind,))]
        try:
            if missing:
                raise ConfigurationError(f"there are no traces or results: {', '.join(missing)}")
            _require_drafts(figure, material)
            data = figure.data(material)
        except ConfigurationError as error:
            if must:
                raise ConfigurationError(f"figure '{name}': {error}") from error
            drawn.skipped[name] = str(error)
            continue
        drawn.paths += write_figure(figure, name, data, folder)
        on_drawn(name)
    return drawn


def _require_drafts(figure: Figure, material: Material) -> None:
    traces = [trace for run in figure.runs for trace in material.traces[run] if trace.header.draft != NO_DRAFT]
    if traces and not any(step.tree.tokens for trace in traces for one in trace.rounds for step in one.steps):
        raise ConfigurationError(
            f"'{traces[0].header.draft}' drafted nothing in its runs: give more prompts or more --max-tokens"
        )


def with_traces(material: Material, traces: Iterable[Trace]) -> Material:
    """Return the material with more traces."""
    grouped = Material.of(traces).traces
    names = dict.fromkeys((*material.traces, *grouped))
    return Material({n: (*material.traces.get(n, ()), *grouped.get(n, ())) for n in names}, material.results)
