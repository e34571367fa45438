"""Base of all figures: what a figure needs, its data as rows, and its drawing. No torch, no matplotlib."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from draftree.core.registry import Registry
from draftree.figures.material import Material

__all__ = ["FIGURES", "Data", "Figure"]

FIGURES: Registry[Figure] = Registry("draftree.figures.gallery", "draftree.figures.base:Figure", kind="figure")


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
        runs: runs of a model that its data come from, by name (`RUNS` in figures/runs.py); all are needed.
        results: kinds of results files that its data come from.
        size: width and height in inches.
    """

    title: ClassVar[str]
    runs: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[str, ...]] = ()
    size: ClassVar[tuple[float, float]] = (6.8, 4.6)

    @abstractmethod
    def data(self, material: Material) -> Data:
        """Return the numbers.

        Raises:
            ConfigurationError: the material has no data for this figure.
        """

    @abstractmethod
    def draw(self, figure: Any, data: Data) -> None:
        """Draw the data into a figure of matplotlib, without title and notes."""
