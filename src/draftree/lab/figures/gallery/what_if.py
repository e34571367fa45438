"""What-if table: speed-up by acceptance and cost of a drafter's pass, at the best length, and where this run is.

Source: arXiv 2211.17192, theorem 3.8.
"""

from __future__ import annotations

import math
from typing import Any, final

from draftree.lab.analysis.theory import best_length, walltime_improvement
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import ink_on
from draftree.lab.figures.measures import acceptance, measured_on, texts_of

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
COSTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
LENGTHS = (1, 2, 3, 4, 5, 6, 8)
LONGEST = 16


@final
class WhatIf(Figure):
    title = "What if: speed-up by acceptance, cost and length (closed form)"
    runs = ("watch",)
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        alpha = acceptance(texts_of(trace)).value
        rows = [
            {"length": k, "acceptance": a, "cost": c, "speedup": walltime_improvement(a, k, c)}
            for k in LENGTHS
            for a in sorted({*ALPHAS, round(alpha, 3)})
            for c in COSTS
        ]
        least = min(rows, key=lambda row: row["speedup"])
        return Data(
            rows,
            measured_on(trace, what="Closed form; one row has the α that was measured") + f", α = {alpha:.3f}",
            f"K = {least['length']}, α = {least['acceptance']:g}, c = {least['cost']:g} takes "
            f"{1 / least['speedup']:.1f} times the time of plain decoding",
            extra=round(alpha, 3),
        )

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2)
        alphas = sorted({row["acceptance"] for row in data.rows})
        lengths = [[best_length(a, c, longest=LONGEST) for c in COSTS] for a in alphas]
        best = [
            [walltime_improvement(a, k, c) for k, c in zip(row, COSTS, strict=True)]
            for a, row in zip(alphas, lengths, strict=True)
        ]
        labels = [
            [f"{value:.2f}\nK={k}" for value, k in zip(*rows, strict=True)] for rows in zip(best, lengths, strict=True)
        ]
        names = [f"{a:g}" + (" measured" if a == data.extra else "") for a in alphas]
        _table(left, best, labels, names, title=f"speed-up at the best K up to {LONGEST}, and this K")
        at = [[walltime_improvement(data.extra, k, c) for c in COSTS] for k in LENGTHS]
        _table(
            right,
            at,
            [[f"{v:.2f}" for v in row] for row in at],
            [str(k) for k in LENGTHS],
            title=f"speed-up at the measured α = {data.extra:g}, by K",
        )
        left.set_ylabel("acceptance α")
        right.set_ylabel("length K")


def _table(axes: Any, values: list[list[float]], labels: list[list[str]], names: list[str], *, title: str) -> None:
    # a logarithm, so that twice as fast and half as fast are equally far from the middle
    image = axes.imshow([[math.log2(v) for v in row] for row in values], cmap="PuOr", vmin=-3, vmax=3, aspect="auto")
    for line, row in enumerate(labels):
        for column, label in enumerate(row):
            ink = ink_on(image, math.log2(values[line][column]))
            axes.text(column, line, label, ha="center", va="center", fontsize=6.5, color=ink)
    axes.set_xticks(range(len(COSTS)), [f"{c:g}" for c in COSTS])
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False)
    axes.set_xlabel("cost c of a drafter's pass / target's pass")
    axes.set_title(title, fontsize=8)
