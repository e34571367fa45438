"""The numbers that a drawn figure holds: of lines, bars, points, error bars, areas and images. Not a test itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Sheet

from draftree.lab.figures.base import Data, Figure

DIGITS = 1e-6


def drawn_values(figure: Figure, data: Data) -> np.ndarray:
    """All finite numbers of the artists of a figure, sorted."""
    sheet = Sheet(figsize=figure.size)
    FigureCanvasAgg(sheet)
    figure.draw(sheet, data)
    found = [np.asarray(values, float).ravel() for axes in sheet.axes for values in values_of(axes)]
    values = np.concatenate(found) if found else np.empty(0)
    return np.unique(values[np.isfinite(values)])


def values_of(axes: Any) -> Iterator[Any]:
    for line in axes.lines:
        yield line.get_xdata(orig=False)
        yield line.get_ydata(orig=False)
    for patch in axes.patches:
        if hasattr(patch, "get_height"):
            yield [patch.get_height(), patch.get_width(), patch.get_x(), patch.get_y()]
    for collection in axes.collections:
        yield collection.get_offsets()
        for path in collection.get_paths():
            yield path.vertices
        if collection.get_array() is not None:
            yield collection.get_array()
    for image in axes.images:
        yield image.get_array()


def drawn_columns(data: Data, values: np.ndarray) -> set[str]:
    """Columns of which every number is drawn; columns of fewer than two different numbers are left out."""
    found = set()
    for name in data.rows[0]:
        column = [row[name] for row in data.rows if is_number(row[name])]
        if len(set(column)) > 1 and all(is_among(float(value), values) for value in column):
            found.add(name)
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def is_among(value: float, values: np.ndarray) -> bool:
    return bool(len(values)) and bool(np.min(np.abs(values - value)) <= DIGITS * max(1.0, abs(value)))
