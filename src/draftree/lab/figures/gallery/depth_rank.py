"""Acceptance by depth and by rank among the siblings, of nodes whose parents were accepted."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, legend
from draftree.lab.figures.measures import guesses, measured_on, ratio, spread, texts_of

MAX_RANK = 4
COLOURS = (INK["measured"], INK["other"], INK["good"], INK["losing"])
BARS = {"error_kw": {"elinewidth": 1.0}}


@final
class DepthRank(Figure):
    title = "Acceptance by depth and rank"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        drafted, kept = [Counter[tuple[int, int]]() for _ in texts], [Counter[tuple[int, int]]() for _ in texts]
        for number, text in enumerate(texts):
            for position in text.positions[:-1]:
                for guess in guesses(position):
                    key = guess.level, guess.rank
                    drafted[number][key] += 1
                    kept[number][key] += guess.is_accepted
        rows = []
        for level, rank in sorted({key for counts in drafted for key in counts if key[1] <= MAX_RANK}):
            below = [counts[level, rank] for counts in drafted]
            found = ratio([counts[level, rank] for counts in kept], below)
            rows.append({"depth": level, "rank": rank, "nodes": sum(below), **found.row("acceptance")})
        if not rows:
            raise ConfigurationError("the trace has no drafted nodes: there is no acceptance to draw")
        least = min(rows, key=lambda row: row["acceptance"])
        return Data(
            rows,
            measured_on(trace, what="Share of drafted nodes that are target tokens, given that their parents are")
            + "; bars: 95% over texts",
            f"rank {least['rank']} at depth {least['depth']}: {least['acceptance']:.3f} of {least['nodes']} nodes",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        ranks = {row["depth"]: max(r["rank"] for r in data.rows if r["depth"] == row["depth"]) for row in data.rows}
        for rank in range(1, MAX_RANK + 1):
            rows = [row for row in data.rows if row["rank"] == rank]
            x = [row["depth"] + 0.2 * (rank - (ranks[row["depth"]] + 1) / 2) for row in rows]
            values = [row["acceptance"] for row in rows]
            axes.bar(
                x,
                values,
                0.19,
                yerr=spread(rows, "acceptance"),
                capsize=2,
                color=COLOURS[rank - 1],
                label=f"rank {rank}",
                **BARS,
            )
        axes.set(xlabel="depth of the node", ylabel="share accepted, given the parent", ylim=(0, 1))
        axes.set_xticks(sorted({row["depth"] for row in data.rows}))
        legend(axes)
