"""Widths 1 to 8 of one drafter, and 1 to 5 merged drafters, at five levels: tokens per pass and drafted nodes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, final

from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, band
from draftree.lab.figures.measures import (
    by_drafters,
    deepest,
    estimates,
    expansion,
    measured_on,
    replay,
    texts_of,
    tokens_per_pass,
    widest,
)

LEVELS = 5
MAX_WIDTH = 8


@final
class WidthMerged(Figure):
    title = "Width of one drafter, and number of merged drafters, at five levels"
    runs = ("watch", "merged")
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        wide, merged = material.one("watch"), material.one("merged")
        texts, others = texts_of(wide), texts_of(merged)
        levels = min(LEVELS, deepest(texts))
        rows: list[dict[str, Any]] = []
        for width in range(1, min(MAX_WIDTH, widest(texts)) + 1):
            cut = expansion(width, *[1] * (levels - 1))
            runs = [replay(text, cut) for text in texts]
            rows.append({"kind": "width", "number": width, "added": "", **_counts(runs)})
        names = [part.name for part in merged.header.parts]
        for number in range(1, len(names) + 1):
            runs = [replay(text, by_drafters(names[:number], LEVELS)) for text in others]
            rows.append({"kind": "merged", "number": number, "added": names[number - 1], **_counts(runs)})
        gains = [
            (after["tokens"] - before["tokens"], after["added"])
            for before, after in pairwise(rows)
            if after["kind"] == "merged" and after["number"] > 1
        ]
        least = min(gains, default=(0.0, "nothing"))
        return Data(
            rows,
            measured_on(wide, what=f"Exact replay, {levels} levels")
            + f"; merged: {merged.header.draft}, up to {LEVELS} "
            "levels each; bars: 95% over texts",
            f"adding {least[1]} changes tokens per pass by {least[0]:+.3f}",
        )

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, kind, colour in ((left, "width", INK["measured"]), (right, "merged", INK["other"])):
            rows = [row for row in data.rows if row["kind"] == kind]
            band(axes, [row["number"] for row in rows], estimates(rows, "tokens"), label=kind, colour=colour)
            for row in rows:
                note = f"{row['nodes']:.1f} nodes" + (f"\n+ {row['added'].split(':')[0]}" if row["added"] else "")
                place = (row["number"], row["tokens_low"])
                axes.annotate(note, place, (0, -14), textcoords="offset points", ha="center", va="top", fontsize=6)
            axes.set_xticks([row["number"] for row in rows])
            axes.margins(x=0.1, y=0.3)
        right.yaxis.set_tick_params(labelleft=True)
        left.set(xlabel="children of the root", ylabel="tokens per pass, bonus included")
        right.set(xlabel="merged drafters")


def _counts(runs: Any) -> dict[str, float]:
    nodes = sum(run.nodes for run in runs) / sum(run.rounds for run in runs)
    return {"nodes": nodes, **tokens_per_pass(runs).row("tokens")}
