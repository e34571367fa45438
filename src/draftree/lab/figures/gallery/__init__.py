"""The figures, by what they are about."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.core.errors import ConfigurationError, suggestion
from draftree.lab.figures.base import FIGURES, Figure
from draftree.lab.figures.gallery import acceptance, confidence, lengths, shapes, times

__all__ = ["acceptance", "chosen_figures", "confidence", "lengths", "shapes", "times"]


def chosen_figures(names: Sequence[str] = ()) -> dict[str, Figure]:
    """Return figures by name; all without names."""
    unknown = next((name for name in names if name not in FIGURES), None)
    if unknown is not None:
        raise ConfigurationError(f"unknown figure '{unknown}': {suggestion(unknown, FIGURES)}")
    return {name: FIGURES[name]() for name in names or sorted(FIGURES)}
