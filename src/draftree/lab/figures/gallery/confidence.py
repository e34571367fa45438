"""The drafter's confidence: its calibration, as a classifier, and over a text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, band, heat_map, legend, printable
from draftree.lab.figures.measures import BARS, Guess, chain, deepest, guesses, measured_on, ratio, texts_of, watched

BINS = 10


@final
class Calibration(Figure):
    title = "Calibration of the drafter's confidence"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
        counts = np.zeros((BINS, len(texts)), int)
        kept = np.zeros_like(counts)
        sums = np.zeros(BINS)
        for number, text in enumerate(texts):
            for position in text.positions[:-1]:
                for guess in guesses(position):
                    if math.isnan(guess.confidence):
                        raise ConfigurationError(
                            f"drafter '{trace.header.draft}' gives no scores: it has no confidence"
                        )
                    place = min(BINS - 1, int(BINS * guess.confidence))
                    counts[place, number] += 1
                    kept[place, number] += guess.is_accepted
                    sums[place] += guess.confidence
        rows = [
            {
                "from": place / BINS,
                "to": (place + 1) / BINS,
                "nodes": int(nodes),
                "confidence": float(sums[place] / nodes),
                **ratio(kept[place], counts[place]).row("acceptance"),
            }
            for place, nodes in enumerate(counts.sum(1))
            if nodes
        ]
        error = sum(row["nodes"] * abs(row["acceptance"] - row["confidence"]) for row in rows) / counts.sum()
        worst = max(rows, key=lambda row: row["confidence"] - row["acceptance"])
        return Data(
            rows,
            measured_on(trace, what="Acceptance of nodes whose parents are on the text, by the drafter's probability")
            + f"; expected calibration error {error:.3f}{BARS}",
            f"nodes with confidence {worst['confidence']:.2f} are accepted {worst['acceptance']:.2f} of the time",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        axes.plot((0, 1), (0, 1), color=INK["theory"], linestyle="--", label="calibrated")
        band(axes, [row["confidence"] for row in data.rows], data.rows, "acceptance", label="measured", linewidth=None)
        axes.set(ylabel="share accepted", ylim=(0, 1))
        legend(axes)
        middles = [(row["from"] + row["to"]) / 2 for row in data.rows]
        below.bar(middles, [row["nodes"] for row in data.rows], 0.9 / BINS, color=INK["theory"])
        below.set(xlabel="confidence: the drafter's probability of the node given its parent", ylabel="nodes")
        below.set_yscale("log")


STEPS = 50


@final
class ConfidenceClassifier(Figure):
    title = "The drafter's confidence as a classifier of “accepted”"
    runs = ("watch",)
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        first = [g for text in texts_of(trace) for p in text.positions[:-1] for g in guesses(p) if g.rank == 1]
        if not first or any(math.isnan(guess.confidence) for guess in first):
            raise ConfigurationError(f"drafter '{trace.header.draft}' gives no scores: it has no confidence")
        rows = [classified(first, step / STEPS) for step in range(STEPS + 1)]
        best = max(rows, key=lambda row: (row["accuracy"], -row["threshold"]))
        always = rows[0]["accuracy"]
        return Data(
            rows,
            measured_on(trace, what=f"{len(first)} first children whose parents are on the text")
            + f"; best threshold {best['threshold']:.2f}: accuracy {best['accuracy']:.3f} against {always:.3f} of "
            f"always drafting, precision {best['precision']:.3f}, recall {best['recall']:.3f}",
            f"at the best threshold {best['false_positives']} rejected nodes are drafted, and "
            f"{best['false_negatives']} accepted ones are not",
            extra=best,
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes, matrix = figure.subplots(1, 2, width_ratios=(2, 1))
        x = [row["threshold"] for row in data.rows]
        for name, (colour, _, line) in zip(("accuracy", "precision", "recall"), SERIES, strict=False):
            axes.plot(x, [row[name] for row in data.rows], color=colour, linestyle=line, label=name)
        best = data.extra
        axes.axvline(best["threshold"], color=INK["theory"], linestyle=":", label="best accuracy")
        axes.set(xlabel="threshold on the confidence", ylabel="rate", ylim=(0, 1.02))
        legend(axes)
        counts = [
            [best["true_positives"], best["false_negatives"]],
            [best["false_positives"], best["true_negatives"]],
        ]
        labels = [[str(count) for count in row] for row in counts]
        heat_map(matrix, counts, labels, columns=("at least", "below"), rows=("accepted", "rejected"), cmap="Blues")
        matrix.set(xlabel="confidence against the threshold", ylabel="the target's verdict")
        matrix.set_title(f"nodes at threshold {best['threshold']:.2f}", fontsize=8)


def classified(nodes: Sequence[Guess], threshold: float) -> dict[str, Any]:
    """Return the confusion matrix and the rates of “accepted if the confidence is at least the threshold”."""
    cells = Counter((guess.confidence >= threshold, guess.is_accepted) for guess in nodes)
    true, false, missed, right = (cells[cell] for cell in ((True, True), (True, False), (False, True), (False, False)))
    return {
        "threshold": threshold,
        "true_positives": true,
        "false_positives": false,
        "false_negatives": missed,
        "true_negatives": right,
        "accuracy": (true + right) / len(nodes),
        "precision": true / (true + false) if true + false else 1.0,
        "recall": true / (true + missed) if true + missed else 1.0,
    }


MAX_POSITIONS = 64


@final
class SurvivalMap(Figure):
    title = "Survival of the drafted chain over one text"
    runs = ("watch",)
    size = (9.0, 4.0)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
        depth = deepest(texts)
        text = texts[0]
        rows: list[dict[str, Any]] = []
        for at, position in enumerate(text.positions[:MAX_POSITIONS]):
            if len(position.tree) and not position.tree.scores:
                raise ConfigurationError(f"drafter '{trace.header.draft}' gives no scores: it has no survival estimate")
            levels = position.levels
            rows += [
                {
                    "position": at,
                    "text": trace.text_of(text.tokens[at]),
                    "depth": levels[node],
                    "estimate": math.exp(min(0.0, position.tree.scores[node])),
                    "survived": node in position.path,
                }
                for node in sorted(chain(depth)(position), key=levels.__getitem__)
            ]
        sure = [row for row in rows if row["estimate"] > 0.5]
        return Data(
            rows,
            measured_on(trace, what="First text: product of the drafter's probabilities; dots: target tokens"),
            f"{sum(not row['survived'] for row in sure)} of {len(sure)} nodes with an estimate above 0.5 did not "
            "survive",
            extra=depth,
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        width = 1 + max(row["position"] for row in data.rows)
        grid = [[math.nan] * width for _ in range(data.extra)]
        for row in data.rows:
            grid[row["depth"] - 1][row["position"]] = row["estimate"]
        style = {"cmap": "Blues", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
        image = axes.imshow(grid, origin="lower", extent=(0, width, 0, data.extra), aspect="auto", **style)
        dots = [(row["position"] + 0.5, row["depth"] - 0.5) for row in data.rows if row["survived"]]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=INK["losing"], markersize=3, label="target token")
            legend(axes, loc="lower right", bbox_to_anchor=(1.0, 1.0))
        texts = {row["position"] + 0.5: printable(row["text"]) for row in data.rows}
        axes.set_xticks(list(texts), list(texts.values()), rotation=90, fontsize=5.5)
        axes.set_yticks([row + 0.5 for row in range(data.extra)], [str(row + 1) for row in range(data.extra)])
        axes.grid(visible=False)
        axes.set(xlabel="the text, token by token", ylabel="depth")
        figure.colorbar(image, ax=axes, label="estimated survival", pad=0.01)
