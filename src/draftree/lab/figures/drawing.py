"""Chooses figures and writes them as SVG, PNG, PDF and CSV with one style. Needs the extra `plots`; no torch."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from draftree.core.errors import ConfigurationError, import_extra
from draftree.core.svg import save_svg
from draftree.engine.trace import Trace, read_trace
from draftree.lab.figures.base import Figure, Material, read_lines
from draftree.options import NO_DRAFT

Row = TypeVar("Row", bound=Mapping[str, Any])
DPI = 110
INK = {"measured": "#0068b5", "theory": "#57606a", "losing": "#d55e00", "other": "#c46ba3", "good": "#00694e"}
"""Colours by meaning: any two can be told apart with each kind of colour blindness (`tests/unit/lab/figures`)."""
SERIES = (
    (INK["measured"], "o", "-"),
    (INK["other"], "s", "--"),
    (INK["good"], "^", "-."),
    ("#b58900", "D", ":"),
    (INK["theory"], "v", "-"),
    ("#2a97b5", "P", "--"),
)
"""Colour, marker and line of the first, second, … line of a drawing: colour is not the only difference."""
CELLS = ("#010101", "#fefefe")
"""Ink on light and on dark cells of heat maps, which are the same in the dark scheme."""
STYLE = {
    "svg.hashsalt": "draftree",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
SHOWN = "⏎·…“”‘’–—αβγ→Σ"
LAST = 0x250
"""End of the Latin characters, which the font has."""
WIDTH = 112
"""Characters of a line of the notes at the width of a figure of 6.8 inches."""


def write_sheet(
    draw: Callable[[Any], None], path: Path, *, title: str, notes: Sequence[str], size: tuple[float, float]
) -> list[Path]:
    """Write a drawing as SVG, PNG and PDF to `path` plus their endings; equal drawings give equal files.

    `draw` draws into a figure of matplotlib, without the title and the notes below; `size` is in inches.
    """
    matplotlib = import_extra("plots", "figures need", error=ConfigurationError)
    path.parent.mkdir(parents=True, exist_ok=True)
    svg, png, pdf = (path.with_name(f"{path.name}.{ending}") for ending in ("svg", "png", "pdf"))
    with matplotlib.rc_context(STYLE):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Sheet

        sheet = Sheet(figsize=size, layout="constrained")
        FigureCanvasAgg(sheet)
        draw(sheet)
        width = int(WIDTH * size[0] / 6.8)
        lines = [printable(line).replace("·", " ") for note in notes for line in textwrap.wrap(note, width)]
        sheet.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        sheet.supxlabel("\n".join(lines), fontsize=7, color="#57606a", x=0.01, ha="left")
        save_svg(sheet, svg)
        sheet.savefig(png, dpi=DPI, metadata={"Software": None})
        sheet.savefig(pdf, metadata={"CreationDate": None})
    return [svg, png, pdf]


def printable(text: str) -> str:
    """Return a text that matplotlib's own font can show: other characters as U+XXXX, line breaks and spaces marked."""
    marked = text.replace("\n", "⏎").replace(" ", "·")
    # "$" begins a formula
    return "".join(c if c.isprintable() and (ord(c) < LAST or c in SHOWN) else f"U+{ord(c):X}" for c in marked).replace(
        "$", r"\$"
    )


def legend(axes: Any, **options: Any) -> None:
    axes.legend(fontsize=7.5, **options)


def dodged(x: Sequence[float], place: int, number: int, *, step: float = 0.06) -> list[float]:
    """Return the places of line `place` of `number`, moved a little so that error bars do not hide one another."""
    return [value + step * (place - (number - 1) / 2) for value in x]


def spread(rows: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """Return the distances from the estimates under a name to their lower and upper ends, for error bars."""
    return [
        [max(0.0, row[name] - row[f"{name}_low"]) for row in rows],
        [max(0.0, row[f"{name}_high"] - row[name]) for row in rows],
    ]


def band(
    axes: Any,
    x: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
    name: str,
    *,
    label: str,
    series: tuple[str, str, str] = SERIES[0],
    **style: Any,
) -> None:
    """Draw the estimates under a name as points with error bars, joined by a line."""
    colour, marker, line = series
    style = {"markersize": 4, "capsize": 2, "linewidth": 1.2} | style
    axes.errorbar(
        x,
        [row[name] for row in rows],
        yerr=spread(rows, name),
        label=label,
        color=colour,
        marker=marker,
        linestyle=line,
        **style,
    )


def grouped(rows: Iterable[Row], name: str) -> dict[Any, list[Row]]:
    """Return the rows by their value under a name, in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def heat_map(
    axes: Any,
    values: Any,
    labels: Sequence[Sequence[str]],
    *,
    columns: Sequence[str],
    rows: Sequence[str],
    fontsize: float | None = None,
    **scale: Any,
) -> Any:
    """Draw a table whose cells are coloured by their values, shape (rows, columns), and return its image."""
    image = axes.imshow(values, **scale)
    for line, (cells, texts) in enumerate(zip(values, labels, strict=True)):
        for column, (value, text) in enumerate(zip(cells, texts, strict=True)):
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = CELLS[0] if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else CELLS[1]
            axes.text(column, line, text, ha="center", va="center", fontsize=fontsize, color=ink)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(visible=False)
    return image


@dataclass(slots=True)
class Drawn:
    """The files that were written, and for every figure that was not drawn the reason."""

    paths: list[Path] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def needed_runs(figures: Mapping[str, Figure], material: Material) -> list[str]:
    """Return the runs that figures need and that the material lacks, for figures without missing results."""
    wanted = [run for figure in figures.values() if material.has((), figure.results) for run in figure.runs]
    return [run for run in dict.fromkeys(wanted) if not material.traces.get(run)]


def material_of(traces: Iterable[Path], results: Iterable[Path]) -> Material:
    lines: dict[str, Sequence[Mapping[str, Any]]] = {}
    for path in results:
        if path.name in lines:
            raise ConfigurationError(f"two results files are named '{path.name}': give only one of them")
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
    """Write the figures that the material has data for as NAME.svg, .png, .pdf and .csv; existing files are replaced.

    Numbers of the CSV have six digits. A figure without data is an error if it was named (`must`). `refused` has the
    reason for runs that could not be recorded; `on_drawn` is called with the name of each written figure.
    """
    drawn = Drawn()
    reasons = refused or {}
    for name, figure in figures.items():
        missing = [reasons.get(run, run) for run in figure.runs if not material.traces.get(run)]
        missing += [f"results of kind '{kind}'" for kind in figure.results if not material.has((), (kind,))]
        try:
            if missing:
                raise ConfigurationError(f"there are no traces or results: {', '.join(missing)}")
            traces = [trace for run in figure.runs for trace in material.traces[run] if trace.header.draft != NO_DRAFT]
            if traces and not any(
                len(step.tree) for trace in traces for traced_round in trace.rounds for step in traced_round.steps
            ):
                raise ConfigurationError(
                    f"'{traces[0].header.draft}' drafted nothing in its runs: give more prompts or more --max-tokens"
                )
            data = figure.data(material)
        except ConfigurationError as error:
            if must:
                raise ConfigurationError(f"figure '{name}': {error}") from error
            drawn.skipped[name] = str(error)
            continue
        notes = (data.measured, f"Losing case: {data.losing}.")
        drawn.paths += write_sheet(
            partial(figure.draw, data=data), folder / name, title=figure.title, notes=notes, size=figure.size
        )
        drawn.paths.append(folder / f"{name}.csv")
        with drawn.paths[-1].open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(data.rows[0]) if data.rows else [], lineterminator="\n")
            writer.writeheader()
            for row in data.rows:
                writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})
        on_drawn(name)
    return drawn


def with_traces(material: Material, traces: Iterable[Trace]) -> Material:
    grouped = Material.of(traces).traces
    names = dict.fromkeys((*material.traces, *grouped))
    return Material({n: (*material.traces.get(n, ()), *grouped.get(n, ())) for n in names}, material.results)
