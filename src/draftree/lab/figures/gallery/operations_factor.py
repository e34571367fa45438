"""Operations of speculative decoding divided by those of plain decoding, against the length of the chain.

Measured are the rows of the target's passes per written token, which is the factor for a drafter without operations.
Source: arXiv 2211.17192, theorem 3.11.
"""

from __future__ import annotations

from typing import Any, final

from draftree.lab.analysis.theory import operations_factor
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, band, legend
from draftree.lab.figures.measures import acceptance, chain, deepest, estimates, measured_on, ratio, replay, texts_of

RATIOS = (0.0, 0.05, 0.1, 0.2)


@final
class OperationsFactor(Figure):
    title = "Operations per token, relative to plain decoding"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        alpha = acceptance(texts).value
        rows: list[dict[str, Any]] = []
        for length in range(deepest(texts) + 1):
            runs = [replay(text, chain(length)) for text in texts]
            counted = ratio([run.nodes + run.rounds for run in runs], [run.tokens for run in runs])
            closed = {f"closed_form_{r:g}": operations_factor(alpha, length, r) for r in RATIOS}
            rows.append({"length": length, **counted.row("measured"), **closed})
        most = rows[-1]
        return Data(
            rows,
            measured_on(trace, what="Rows of target passes per written token")
            + f"; closed form at α = {alpha:.3f}; bars: 95% over texts",
            f"with {most['length']} drafted tokens the target computes {most['measured']:.2f} times the operations of "
            "plain decoding: where operations and not memory limit speed, drafting loses",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = [row["length"] for row in data.rows]
        for place, r in enumerate(RATIOS):
            name = "closed form, drafter without operations" if r == 0 else f"closed form, drafter {r:g} of the target"
            values = [row[f"closed_form_{r:g}"] for row in data.rows]
            axes.plot(x, values, color=INK["theory"], linestyle=("--", ":", "-.", "-")[place], label=name)
        band(axes, x, estimates(data.rows, "measured"), label="measured, target only", colour=INK["measured"])
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xlabel="length K of the chain", ylabel="operations / plain operations", ylim=(0, None))
        legend(axes)
