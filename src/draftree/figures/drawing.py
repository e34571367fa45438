"""Writes a figure as SVG, PNG and CSV with one style. Needs the extra `plots`; no torch."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftree.bench.dark_svg import save_svg
from draftree.core.errors import ConfigurationError
from draftree.core.extras import import_extra
from draftree.figures.base import Data, Figure

__all__ = ["CELLS", "INK", "SERIES", "band", "dodged", "ink_on", "legend", "printable", "write_figure"]

DPI = 110
INK = {"measured": "#0068b5", "theory": "#57606a", "losing": "#d55e00", "other": "#c46ba3", "good": "#00694e"}
"""Colours by meaning: any two can be told apart with each kind of colour blindness (`tests/unit/figures`)."""
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
        save_svg(sheet, paths[0])
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


def dodged(x: Sequence[float], place: int, number: int, *, step: float = 0.06) -> list[float]:
    """Return the places of one of several lines, moved a little so that error bars do not hide one another.

    Args:
        x: places on the axis.
        place: index of the line.
        number: number of lines.
        step: distance between two lines.
    """
    return [value + step * (place - (number - 1) / 2) for value in x]


def ink_on(image: Any, value: float) -> str:
    """Return the ink of a label on the cell of a heat map that has this value."""
    red, green, blue, _ = image.cmap(image.norm(value))
    return CELLS[0] if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else CELLS[1]


def band(
    axes: Any,
    x: Sequence[float],
    estimates: Sequence[Any],
    *,
    label: str,
    colour: str,
    marker: str = "o",
    line: str = "-",
) -> None:
    """Draw estimates as points with error bars, joined by a line."""
    errors = list(zip(*(estimate.errors for estimate in estimates), strict=True))
    values = [estimate.value for estimate in estimates]
    axes.errorbar(
        x, values, yerr=errors, label=label, color=colour, marker=marker, linestyle=line, markersize=4, capsize=2,
        linewidth=1.2,
    )  # fmt: skip
