"""The drafter's confidence: its calibration, as a classifier, and over a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, ink_on, legend, printable
from draftree.lab.figures.measures import Guess, Position, chain, deepest, guesses, measured_on, ratio, spread, texts_of

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
    true = cells.get((True, True), 0)
    false = cells.get((True, False), 0)
    missed = cells.get((False, True), 0)
    right = cells.get((False, False), 0)
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


MAX_POSITIONS = 64


@final
class SurvivalMap(Figure):
    title = "Survival of the drafted chain over one text"
    runs = ("watch",)
    size = (9.0, 4.0)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        depth = deepest(texts)
        text = texts[0]
        rows: list[dict[str, Any]] = []
        for at, position in enumerate(text.positions[:MAX_POSITIONS]):
            if len(position.tree) and not position.tree.scores:
                raise ConfigurationError(f"drafter '{trace.header.draft}' gives no scores: it has no survival estimate")
            rows += _rows(at, trace.text_of(text.tokens[at]), position, depth)
        sure = [row for row in rows if row["estimate"] > 0.5 and not row["survived"]]
        total = sum(row["estimate"] > 0.5 for row in rows)
        return Data(
            rows,
            measured_on(trace, what="First text: product of the drafter's probabilities; dots: target tokens"),
            f"{len(sure)} of {total} nodes with an estimate above 0.5 did not survive",
            extra=depth,
        )  # fmt: skip

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        width = 1 + max(row["position"] for row in data.rows)
        grid = [[math.nan] * width for _ in range(data.extra)]
        for row in data.rows:
            grid[row["depth"] - 1][row["position"]] = row["estimate"]
        image = axes.imshow(
            grid, cmap="Blues", vmin=0, vmax=1, origin="lower", extent=(0, width, 0, data.extra), aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        dots = [(row["position"] + 0.5, row["depth"] - 0.5) for row in data.rows if row["survived"]]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=INK["losing"], markersize=3, label="target token")
            axes.legend(fontsize=7.5, loc="lower right", bbox_to_anchor=(1.0, 1.0))
        labels = {row["position"]: row["text"] for row in data.rows}
        places = sorted(labels)
        axes.set_xticks(
            [at + 0.5 for at in places],
            [printable(labels[at]) for at in places],
            rotation=90, fontsize=5.5,
        )  # fmt: skip
        axes.set_yticks([row + 0.5 for row in range(data.extra)], [str(row + 1) for row in range(data.extra)])
        axes.grid(visible=False)
        axes.set(xlabel="the text, token by token", ylabel="depth")
        figure.colorbar(image, ax=axes, label="estimated survival", pad=0.01)


def _rows(at: int, text: str, position: Position, depth: int) -> list[dict[str, Any]]:
    nodes = sorted(chain(depth)(position), key=lambda node: position.levels[node])
    return [
        {
            "position": at,
            "text": text,
            "depth": position.levels[node],
            "estimate": math.exp(min(0.0, position.tree.scores[node])),
            "survived": node in position.path,
        }
        for node in nodes
    ]
