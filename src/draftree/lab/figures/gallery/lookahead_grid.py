"""Tokens per pass of the lookahead drafter by length of its n-grams and number of candidates.

Source: arXiv 2402.02057, and its pool of n-grams without a window.
"""

from __future__ import annotations

from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.registry import Spec
from draftree.drafters import DRAFTERS
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import ink_on
from draftree.lab.figures.measures import measured_on, tokens_per_round


@final
class LookaheadGrid(Figure):
    title = "Lookahead: tokens per pass by length and number of n-grams"
    runs = ("lookahead",)

    def data(self, material: Material) -> Data:
        traces = material.all("lookahead")
        rows: list[dict[str, Any]] = []
        for trace in traces:
            options = dict(_spec(trace.header.draft).options)
            steps = [step for one in trace.rounds for step in one.steps]
            nodes = sum(len(step.scored) for step in steps) / len(steps)
            grams, kept = int(options["n"]), int(options["candidates"])
            found = tokens_per_round(trace)
            rows.append({"n": grams, "candidates": kept, "nodes_per_pass": nodes, **found.row("tokens")})
        rows.sort(key=lambda row: (row["n"], row["candidates"]))
        large = rows[-1]
        return Data(
            rows,
            measured_on(traces[0], what="Tokens per pass, 95% interval over texts, drafted nodes per pass").replace(
                f"drafter {traces[0].header.draft}", "drafter lookahead without a window"
            )
            + f"; each cell is a run over these texts, plan {traces[0].header.plan}",
            f"{large['n']}-grams with {large['candidates']} candidates draft {large['nodes_per_pass']:.1f} nodes per "
            f"pass for {large['tokens']:.2f} tokens",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        grams = sorted({row["n"] for row in data.rows})
        kept = sorted({row["candidates"] for row in data.rows})
        cells = {(row["n"], row["candidates"]): row for row in data.rows}
        if len(cells) != len(grams) * len(kept):
            raise ConfigurationError(
                "the traces of the run 'lookahead' are no grid: record all pairs of n and candidates"
            )
        image = axes.imshow([[cells[n, k]["tokens"] for k in kept] for n in grams], cmap="Blues", aspect="auto")
        for line, n in enumerate(grams):
            for column, k in enumerate(kept):
                row = cells[n, k]
                label = f"{row['tokens']:.2f}\n({row['tokens_low']:.2f}–{row['tokens_high']:.2f})\n"
                label += f"{row['nodes_per_pass']:.1f} nodes"
                ink = ink_on(image, row["tokens"])
                axes.text(column, line, label, ha="center", va="center", fontsize=7, color=ink)
        axes.set_xticks(range(len(kept)), [str(k) for k in kept])
        axes.set_yticks(range(len(grams)), [f"{n}-grams" for n in grams])
        axes.grid(visible=False)
        axes.set_xlabel("candidates K of a token")
        figure.colorbar(image, ax=axes, label="tokens per pass")


def _spec(draft: str) -> Spec:
    (spec,) = DRAFTERS.parse(draft)
    return spec
