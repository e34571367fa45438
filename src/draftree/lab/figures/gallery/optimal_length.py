"""Optimal length of a chain against acceptance, for several costs of a drafter's pass, with a point per text.

Source: arXiv 2211.17192, section 3.5: the length with the best (1 - α^(K + 1)) / ((1 - α) (K c + 1)).
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from draftree.lab.analysis.theory import best_length
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import SERIES, legend
from draftree.lab.figures.measures import Text, acceptances, chain, deepest, measured_on, replay, texts_of

COSTS = (0.02, 0.1, 0.3)
LONGEST = 12


@final
class OptimalLength(Figure):
    title = "Optimal length of a chain against acceptance"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        limit = deepest(texts)
        rows = []
        for number, (text, (hits, places)) in enumerate(zip(texts, acceptances(texts), strict=True), 1):
            alpha = hits / places if places else 0.0
            for cost in COSTS:
                predicted = min(limit, best_length(alpha, cost))
                best = best_of(text, cost, limit)
                rows.append({"text": number, "acceptance": alpha, "cost": cost, "best": best, "predicted": predicted})
        worst = min(rows, key=lambda row: (row["best"], row["acceptance"]))
        equal = sum(row["best"] == row["predicted"] for row in rows) / len(rows)
        return Data(
            rows,
            measured_on(trace, what=f"Best length up to {limit} by exact replay, one point per text and cost")
            + f"; equal to the closed form (cut at {limit}) in {equal:.0%} of the cases",
            f"text {worst['text']} (α = {worst['acceptance']:.2f}) at cost {worst['cost']:g} is best with "
            f"{worst['best']} drafted tokens",
            extra=limit,
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        alphas = np.linspace(0.01, 0.97, 97)
        for cost, (colour, marker, line), shift in zip(COSTS, SERIES, (-0.12, 0.0, 0.12), strict=False):
            curve = [best_length(a, cost, longest=LONGEST) for a in alphas]
            axes.step(alphas, curve, color=colour, linestyle=line, linewidth=1.0, where="mid")
            rows = [row for row in data.rows if row["cost"] == cost]
            points = [row["best"] + shift for row in rows]
            axes.plot(
                [row["acceptance"] for row in rows], points, linestyle="none", color=colour, marker=marker, markersize=4
            )
            axes.plot([], [], color=colour, linestyle=line, marker=marker, markersize=4, label=f"c = {cost:g}")
        axes.axhline(data.extra, color="black", linewidth=0.8, linestyle=":")
        axes.annotate("longest recorded chain", (0.02, data.extra + 0.15), fontsize=7)
        axes.set(xlabel="acceptance α of the first drafted token", ylabel="best length K", ylim=(-0.5, LONGEST + 0.5))
        legend(axes, title="line: closed form; points: texts, replayed", title_fontsize=7.5)


def best_of(text: Text, cost: float, limit: int) -> int:
    """Return the length with the most tokens per unit of time, the shortest among equals."""
    speeds = []
    for length in range(limit + 1):
        run = replay(text, chain(length))
        speeds.append(run.tokens / (run.rounds * (length * cost + 1)))
    return int(np.argmax(speeds))
