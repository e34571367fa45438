"""The drafter's confidence as a classifier of accepted: confusion matrix, precision, recall, and the best threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, ink_on, legend
from draftree.lab.figures.measures import Guess, guesses, measured_on, texts_of

STEPS = 50


@final
class ConfidenceClassifier(Figure):
    title = "The drafter's confidence as a classifier of “accepted”"
    runs = ("watch",)
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        found = [g for text in texts_of(trace) for p in text.positions[:-1] for g in guesses(p) if g.rank == 1]
        if not found or any(math.isnan(guess.confidence) for guess in found):
            raise ConfigurationError(f"drafter '{trace.header.draft}' gives no scores: it has no confidence")
        rows = [classified(found, step / STEPS) for step in range(STEPS + 1)]
        best = max(rows, key=lambda row: (row["accuracy"], -row["threshold"]))
        always = rows[0]["accuracy"]
        missed = best["false_positives"]
        return Data(
            rows,
            measured_on(trace, what=f"{len(found)} first children whose parents are on the text")
            + f"; best threshold {best['threshold']:.2f}: accuracy {best['accuracy']:.3f} against {always:.3f} of "
            f"always drafting, precision {best['precision']:.3f}, recall {best['recall']:.3f}",
            f"at the best threshold {missed} rejected nodes are drafted, and {best['false_negatives']} accepted ones "
            "are not",
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
        image = matrix.imshow(counts, cmap="Blues")
        for place, row in enumerate(counts):
            for column, count in enumerate(row):
                matrix.text(column, place, str(count), ha="center", va="center", color=ink_on(image, count))
        matrix.set_xticks((0, 1), ("at least", "below"))
        matrix.set_yticks((0, 1), ("accepted", "rejected"))
        matrix.set(xlabel="confidence against the threshold", ylabel="the target's verdict")
        matrix.grid(visible=False)
        matrix.set_title(f"nodes at threshold {best['threshold']:.2f}", fontsize=8)


def classified(found: Sequence[Guess], threshold: float) -> dict[str, Any]:
    """Return the confusion matrix and the rates of “accepted if the confidence is at least the threshold”."""
    cells = {(g.confidence >= threshold, g.is_accepted): 0 for g in found}
    for guess in found:
        cells[guess.confidence >= threshold, guess.is_accepted] += 1
    true, false = cells.get((True, True), 0), cells.get((True, False), 0)
    missed, right = cells.get((False, True), 0), cells.get((False, False), 0)
    return {
        "threshold": threshold,
        "true_positives": true,
        "false_positives": false,
        "false_negatives": missed,
        "true_negatives": right,
        "accuracy": (true + right) / len(found),
        "precision": true / (true + false) if true + false else 1.0,
        "recall": true / (true + missed) if true + missed else 1.0,
    }
