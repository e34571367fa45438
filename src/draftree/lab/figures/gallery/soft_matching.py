"""Soft against exact matching: tokens per pass, and how much of the text stays that of plain decoding."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.engine.trace import Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK
from draftree.lab.figures.measures import measured_on, ratio, spread, texts_by_sequence, tokens_per_round


@final
class SoftMatching(Figure):
    title = "Soft against exact matching"
    runs = ("soft",)

    def data(self, material: Material) -> Data:
        traces = material.all("soft")
        plain = next((trace for trace in traces if trace.header.verify == "coupled"), None)
        if plain is None:
            raise ConfigurationError("the traces of the run 'soft' have none of the rule coupled: record one")
        rows = [
            {"rule": trace.header.verify, **tokens_per_round(trace).row("tokens"), **_equal(plain, trace).row("equal")}
            for trace in traces
        ]
        worst = min(rows, key=lambda row: row["equal"])
        return Data(
            rows,
            measured_on(traces[0], what="Tokens per pass, and share of the text before its first difference from plain "
                        "decoding with the same seed") + "; bars: 95% over texts",
            f"{worst['rule']} keeps only {worst['equal']:.0%} of the tokens before the first difference",
        )  # fmt: skip

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        names = [row["rule"] for row in data.rows]
        for axes, key, label in (
            (left, "tokens", "tokens per pass"),
            (right, "equal", "share equal to plain decoding"),
        ):
            values = [row[key] for row in data.rows]
            colours = [INK["measured"] if name.startswith("coupled") else INK["losing"] for name in names]
            axes.barh(names, values, xerr=spread(data.rows, key), color=colours, capsize=2)
            axes.set_xlabel(label)
        left.invert_yaxis()
        right.set_xlim(0, 1.02)


def _equal(plain: Trace, trace: Trace) -> Any:
    """Return the share of tokens before the first difference from the text of `coupled`, which is the plain one."""
    pairs = list(zip(texts_by_sequence(plain), texts_by_sequence(trace), strict=True))
    same = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))) for pair in pairs]
    return ratio(same, [len(text) for text, _ in pairs])
