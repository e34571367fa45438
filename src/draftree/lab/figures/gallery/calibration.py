"""Reliability diagram: how often nodes of a given confidence of the drafter are accepted."""

from __future__ import annotations

import math
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, legend
from draftree.lab.figures.measures import guesses, measured_on, ratio, spread, texts_of

BINS = 10


@final
class Calibration(Figure):
    title = "Calibration of the drafter's confidence"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        shape = [[0] * len(texts) for _ in range(BINS)]
        counts = shape
        kept = [list(row) for row in shape]
        sums = [0.0] * BINS
        for number, text in enumerate(texts):
            for position in text.positions[:-1]:
                for guess in guesses(position):
                    if math.isnan(guess.confidence):
                        raise ConfigurationError(
                            f"drafter '{trace.header.draft}' gives no scores: it has no confidence"
                        )
                    place = min(BINS - 1, int(BINS * guess.confidence))
                    counts[place][number] += 1
                    kept[place][number] += guess.is_accepted
                    sums[place] += guess.confidence
        total = sum(map(sum, counts))
        rows = [
            {
                "from": place / BINS,
                "to": (place + 1) / BINS,
                "nodes": sum(counts[place]),
                "confidence": sums[place] / sum(counts[place]),
                **ratio(kept[place], counts[place]).row("acceptance"),
            }
            for place in range(BINS)
            if sum(counts[place])
        ]
        error = sum(row["nodes"] * abs(row["acceptance"] - row["confidence"]) for row in rows) / total
        worst = max(rows, key=lambda row: row["confidence"] - row["acceptance"])
        return Data(
            rows,
            measured_on(trace, what="Acceptance of nodes whose parents are on the text, by the drafter's probability")
            + f"; expected calibration error {error:.3f}; bars: 95% over texts",
            f"nodes with confidence {worst['confidence']:.2f} are accepted {worst['acceptance']:.2f} of the time",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        x = [row["confidence"] for row in data.rows]
        values = [row["acceptance"] for row in data.rows]
        axes.plot((0, 1), (0, 1), color=INK["theory"], linestyle="--", label="calibrated")
        axes.errorbar(
            x,
            values,
            yerr=spread(data.rows, "acceptance"),
            marker="o",
            markersize=4,
            capsize=2,
            color=INK["measured"],
            label="measured",
        )
        axes.set(ylabel="share accepted", ylim=(0, 1))
        legend(axes)
        middles = [(row["from"] + row["to"]) / 2 for row in data.rows]
        below.bar(middles, [row["nodes"] for row in data.rows], 0.9 / BINS, color=INK["theory"])
        below.set(xlabel="confidence: the drafter's probability of the node given its parent", ylabel="nodes")
        below.set_yscale("log")
