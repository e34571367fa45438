"""Writes a figure as SVG, PNG and CSV with one style. Needs the extra `plots`; no torch."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.core.extras import import_extra
from draftree.figures.base import Data, Figure

__all__ = ["INK", "band", "legend", "printable", "write_figure"]

DPI = 110
INK = {"measured": "#1f6feb", "theory": "#57606a", "losing": "#cf222e", "other": "#8250df", "good": "#1a7f37"}
"""Colours by meaning: they differ in lightness, too."""
STYLE = {
    "svg.hashsalt": "draftree",
    "svg.fonttype": "none",
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


def write_figure(figure: Figure, name: str, data: Data, folder: Path) -> list[Path]:
    """Write NAME.svg, NAME.png and NAME.csv; existing files of these names are replaced.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    matplotlib = import_extra("plots", "figures need", error=ConfigurationError)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in ("svg", "png", "csv")]
    with matplotlib.rc_context(STYLE):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Sheet

        sheet = Sheet(figsize=figure.size, layout="constrained")
        FigureCanvasAgg(sheet)
        figure.draw(sheet, data)
        _notes(sheet, figure, data)
        sheet.savefig(paths[0], metadata={"Date": None})
        sheet.savefig(paths[1], dpi=DPI, metadata={"Software": None})
    write_rows(paths[2], data.rows)
    return paths


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, numbers with six digits."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})


def _notes(sheet: Any, figure: Figure, data: Data) -> None:
    """Add the title, what was measured, and the losing case."""
    width = int(WIDTH * figure.size[0] / 6.8)
    lines = [*textwrap.wrap(data.measured, width), *textwrap.wrap(f"Losing case: {data.losing}.", width)]
    lines = [printable(line).replace("·", " ") for line in lines]
    sheet.suptitle(figure.title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    sheet.supxlabel("\n".join(lines), fontsize=7, color="#57606a", x=0.01, ha="left")


def printable(text: str) -> str:
    """Return a text that matplotlib's own font can show: other characters as U+XXXX, line breaks and spaces marked."""
    marked = text.replace("\n", "⏎").replace(" ", "·")
    # "$" begins a formula
    return "".join(c if c.isprintable() and (ord(c) < LAST or c in SHOWN) else f"U+{ord(c):X}" for c in marked).replace(
        "$", r"\$"
    )


def legend(axes: Any, **given: Any) -> None:
    """Add a legend with small text."""
    axes.legend(fontsize=7.5, **given)


def band(
    axes: Any, x: Sequence[float], estimates: Sequence[Any], *, label: str, colour: str, marker: str = "o"
) -> None:
    """Draw estimates as points with error bars, joined by a line."""
    errors = list(zip(*(estimate.errors for estimate in estimates), strict=True))
    values = [estimate.value for estimate in estimates]
    axes.errorbar(
        x, values, yerr=errors, label=label, color=colour, marker=marker, markersize=4, capsize=2, linewidth=1.2
    )
