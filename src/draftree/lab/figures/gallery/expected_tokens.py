"""Tokens per pass of a chain against its length, beside the closed form (1 - α^(K + 1)) / (1 - α).

Source: arXiv 2211.17192, equation 1. The closed form assumes that all drafted tokens have the same acceptance,
independently of one another.
"""

from __future__ import annotations

from typing import Any, final

from draftree.lab.analysis.theory import expected_tokens
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, band, legend
from draftree.lab.figures.measures import (
    acceptance,
    chain,
    deepest,
    estimates,
    measured_on,
    replay,
    texts_of,
    tokens_per_pass,
    worst_text,
)

CURVES = (0.5, 0.7, 0.9)


@final
class ExpectedTokens(Figure):
    title = "Tokens per pass of a drafted chain, beside the closed form"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        alpha = acceptance(texts)
        rows = [
            {
                "length": length,
                **tokens_per_pass([replay(text, chain(length)) for text in texts]).row("measured"),
                "closed_form": expected_tokens(alpha.value, length),
                "acceptance": alpha.value,
            }
            for length in range(deepest(texts) + 1)
        ]
        return Data(
            rows,
            measured_on(trace, what="Exact replay of chains") + f"; α = {alpha.value:.3f} "
            f"({alpha.low:.3f} to {alpha.high:.3f}) of the first drafted token; bars: 95% over texts",
            worst_text(texts, chain(len(rows) - 1), "the longest chain", text_of=trace.text_of),
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = [row["length"] for row in data.rows]
        alpha = data.rows[0]["acceptance"]
        for other in CURVES:
            axes.plot(x, [expected_tokens(other, k) for k in x], color=INK["theory"], alpha=0.35, linewidth=0.8)
            axes.annotate(
                f"α = {other}", (x[-1], expected_tokens(other, x[-1])), (5, 0), textcoords="offset points", va="center",
                fontsize=7, color=INK["theory"],
            )  # fmt: skip
        closed = [row["closed_form"] for row in data.rows]
        axes.plot(x, closed, color=INK["theory"], linestyle="--", label=f"closed form at α = {alpha:.3f}")
        band(axes, x, estimates(data.rows, "measured"), label="measured", colour=INK["measured"])
        axes.set(xlabel="length K of the chain", ylabel="tokens per pass, bonus included", xlim=(-0.2, x[-1] + 0.5))
        axes.set_xticks(x)
        legend(axes)
