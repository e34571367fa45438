"""Survival map of one text: the drafter's estimate that a chain survives to each depth, and where it did."""

from __future__ import annotations

import math
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, printable
from draftree.lab.figures.measures import Position, chain, deepest, measured_on, texts_of

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
