"""Cumulative distribution of the tokens that one round writes, for trees of several widths.

Source: SpecInfer, arXiv 2305.09781, figure 9, of the average verified tokens by tree width.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, final

from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import SERIES, legend
from draftree.lab.figures.measures import deepest, expansion, measured_on, ratio, replay, texts_of, widest

WIDTHS = (1, 2, 4, 8)


@final
class VerifiedCdf(Figure):
    title = "Verified tokens per round (cumulative distribution)"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        depth = deepest(texts)
        width = widest(texts)
        rows: list[dict[str, Any]] = []
        for first in [one for one in WIDTHS if one <= width]:
            runs = [replay(text, expansion(first, *[1] * (depth - 1))) for text in texts]
            counts = [Counter(count + 1 for count in run.accepted) for run in runs]
            for tokens in range(1, depth + 2):
                below = [sum(n for value, n in count.items() if value <= tokens) for count in counts]
                found = ratio(below, [run.rounds for run in runs])
                rows.append({"width": first, "tokens": tokens, **found.row("share")})
        ones = [row for row in rows if row["tokens"] == 1]
        return Data(
            rows,
            measured_on(trace, what=f"Exact replay of trees with 1 to {width} children of the root, {depth} levels")
            + "; shaded: 95% over texts",
            f"with one child {ones[0]['share']:.0%} of the rounds write only one token, as plain decoding does",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        widths = dict.fromkeys(row["width"] for row in data.rows)
        for width, (colour, _, line) in zip(widths, SERIES, strict=False):
            rows = [row for row in data.rows if row["width"] == width]
            x = [0, *(row["tokens"] for row in rows)]
            values = [0.0, *(row["share"] for row in rows)]
            axes.step(x, values, where="post", color=colour, linestyle=line, label=f"width {width}")
            low, high = [0.0, *(row["share_low"] for row in rows)], [0.0, *(row["share_high"] for row in rows)]
            axes.fill_between(x, low, high, step="post", color=colour, alpha=0.12, linewidth=0)
        axes.set(xlabel="tokens of a round, bonus included", ylabel="share of rounds with at most so many", ylim=(0, 1))
        legend(axes, loc="lower right")
