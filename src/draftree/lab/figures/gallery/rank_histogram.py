"""Rank of the target's next token among the drafter's first guesses."""

from __future__ import annotations

from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK
from draftree.lab.figures.measures import Text, measured_on, ratio, spread, texts_of, widest


@final
class RankHistogram(Figure):
    title = "Rank of the target's next token among the drafter's guesses"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        width = widest(texts)
        if not width:
            raise ConfigurationError("the trace has no drafted nodes: there is no rank to draw")
        places = [len(text.positions) - 1 for text in texts]
        ranks = [_ranks(text) for text in texts]
        rows = [
            {"rank": rank, **ratio([one.count(rank) for one in ranks], places).row("share")}
            for rank in (*range(1, width + 1), 0)
        ]
        return Data(
            rows,
            measured_on(trace, what=f"Rank among the first {width} guesses at every position")
            + "; bars: 95% over texts",
            f"at {rows[-1]['share']:.0%} of the positions the target's token is not among {width} guesses",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = range(len(data.rows))
        colours = [*[INK["measured"]] * (len(data.rows) - 1), INK["losing"]]
        axes.bar(x, [row["share"] for row in data.rows], yerr=spread(data.rows, "share"), capsize=2, color=colours)
        total = 0.0
        sums = []
        for row in data.rows[:-1]:
            total += row["share"]
            sums.append(total)
        axes.plot(x[:-1], sums, "o--", color=INK["theory"], markersize=3)
        axes.annotate(
            "cumulative", (x[-2], sums[-1]), (0, 5), textcoords="offset points", ha="right", fontsize=7,
            color=INK["theory"],
        )  # fmt: skip
        axes.set_xticks(x, [*(str(row["rank"]) for row in data.rows[:-1]), "absent"])
        axes.set(
            xlabel="rank of the target's token among the drafter's guesses", ylabel="share of positions", ylim=(0, 1)
        )


def _ranks(text: Text) -> list[int]:
    return [p.ranks[p.path[0]] if p.path else 0 for p in text.positions[:-1]]
