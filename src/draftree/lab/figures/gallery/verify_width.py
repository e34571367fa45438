"""Verify success by width: the share of positions at which one of the first w children is the target's token.

Source: SpecInfer, arXiv 2305.09781, table 1, of the success of verification by tree width.
"""

from __future__ import annotations

from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import SERIES, band, dodged, legend
from draftree.lab.figures.measures import Text, deepest, estimates, guesses, measured_on, ratio, texts_of


@final
class VerifyWidth(Figure):
    title = "Verify success by the number of children"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        rows = []
        for level in range(1, deepest(texts) + 1):
            ranks = [_ranks(text, level) for text in texts]
            width = max((drafted for one in ranks for _, drafted in one), default=0)
            for children in range(1, width + 1):
                hits = [sum(0 < rank <= children for rank, _ in one) for one in ranks]
                found = ratio(hits, [len(one) for one in ranks])
                rows.append({"level": level, "children": children, **found.row("success")})
        if not rows:
            raise ConfigurationError("the trace has no drafted nodes: there is no success to draw")
        least = min(rows, key=lambda row: row["success"])
        return Data(
            rows,
            measured_on(trace, what="Share of nodes on the text with an accepted child") + "; bars: 95% over texts",
            f"at depth {least['level']} with {least['children']} child{'' if least['children'] == 1 else 'ren'} "
            f"{1 - least['success']:.0%} of the verifications fail",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        levels = list(dict.fromkeys(row["level"] for row in data.rows))
        for place, (level, (colour, marker, line)) in enumerate(zip(levels, SERIES * 3, strict=False)):
            rows = [row for row in data.rows if row["level"] == level]
            x = dodged([row["children"] for row in rows], place, len(levels))
            band(axes, x, estimates(rows, "success"), label=f"depth {level}", colour=colour, marker=marker, line=line)
        axes.set(xlabel="children of the node", ylabel="share with an accepted child", ylim=(0, 1))
        axes.set_xticks(sorted({row["children"] for row in data.rows}))
        legend(axes, loc="lower right")


def _ranks(text: Text, level: int) -> list[tuple[int, int]]:
    """Return the accepted rank, 0 for none, and the children of every node on the text above this level."""
    found = []
    for position in text.positions[:-1]:
        here = [guess for guess in guesses(position) if guess.level == level]
        if here:
            found.append((next((guess.rank for guess in here if guess.is_accepted), 0), len(here)))
    return found
