"""Tokens per pass against the number of drafted nodes: chains, k-ary trees, expansions, best-first, merged, oracle.

The oracle drafts only the accepted nodes of the wide tree, so none of its parts (chain, k-ary, expansion) does better.
The drafts of best-first and merged trees are others, which it does not bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from draftree.engine.trace import Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, band, legend
from draftree.lab.figures.measures import (
    Cut,
    Position,
    Text,
    best_first,
    chain,
    deepest,
    estimates,
    expansion,
    k_ary,
    measured_on,
    replay,
    texts_of,
    tokens_per_pass,
    widest,
    worst_text,
)

SIZES = (1, 2, 4, 8, 16, 32, 64)
LABELS = {"oracle": "oracle of the wide tree"}
MERGED_LEVELS = 4
"""Levels of merged trees that are drawn, besides the whole tree."""
FAMILIES = {
    "chain": (INK["measured"], "o"),
    "k-ary, k = 2": (INK["other"], "s"),
    "expansion": (INK["good"], "^"),
    "best-first": ("#b58900", "D"),
    "merged": ("#2a97b5", "v"),
    "oracle": (INK["theory"], "x"),
}


@final
class TreeBudget(Figure):
    title = "Tokens per pass against the budget of drafted nodes"
    runs = ("watch", "best", "merged")

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        rows = [
            _row(family, texts, cut)
            for source, trees in (("watch", _shapes), ("best", _best), ("merged", _merged))
            for texts in [texts_of(material.one(source))]
            for family, cut in trees(texts)
        ]
        losing = next(row for row in rows if row["family"] == "chain" and row["budget"] == 1)
        most = max((row for row in rows if row["family"] != "oracle"), key=lambda row: row["nodes"])
        gain = most["tokens"] / losing["tokens"]
        return Data(
            rows,
            _measured(trace, material) + "; bars: 95% over texts",
            f"{most['nodes']:.0f} nodes per pass write {gain:.2f} times the tokens of one node; "
            + worst_text(texts_of(trace), chain(4), "a chain of 4", text_of=trace.text_of),
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        for (family, (colour, marker)), line in zip(FAMILIES.items(), ("-", "--", "-.", "-", "--", ":"), strict=True):
            rows = [row for row in data.rows if row["family"] == family]
            x = [row["nodes"] for row in rows]
            band(
                axes,
                x,
                estimates(rows, "tokens"),
                label=LABELS.get(family, family),
                colour=colour,
                marker=marker,
                line=line,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.set(xlabel="drafted nodes per pass", ylabel="tokens per pass, bonus included")
        legend(axes)


def _measured(trace: Trace, material: Material) -> str:
    merged = material.one("merged").header.draft
    return measured_on(trace, what="Exact replay of trees") + (
        f"; merged: {merged}; oracle: only the accepted nodes of the wide tree, the bound of its parts "
        "(chain, k-ary, expansion); best-first and merged draft other nodes"
    )


def _row(family: str, texts: Sequence[Text], cut: Cut) -> dict[str, Any]:
    runs = [replay(text, cut) for text in texts]
    nodes = sum(run.nodes for run in runs) / sum(run.rounds for run in runs)
    budget = max((len(set(cut(p))) for text in texts for p in text.positions), default=0)
    return {"family": family, "budget": budget, "nodes": nodes, **tokens_per_pass(runs).row("tokens")}


def _shapes(texts: Sequence[Text]) -> Iterator[tuple[str, Cut]]:
    """Yield the cuts of a wide tree."""
    depth = deepest(texts)
    width = widest(texts)
    for length in range(1, depth + 1):
        yield "chain", chain(length)
        yield "k-ary, k = 2", k_ary(min(2, width), length)
    for first in (2, 4, width):
        yield "expansion", expansion(min(first, width), *(2, 1, 1, 1, 1)[: depth - 1])
    for size in (1, 2, 4, 8):
        yield "oracle", _oracle(size)


def _oracle(size: int) -> Cut:
    def cut(position: Position) -> Sequence[int]:
        return position.path[:size]

    return cut


def _best(texts: Sequence[Text]) -> Iterator[tuple[str, Cut]]:
    most = max((len(p.tree) for text in texts for p in text.positions), default=0)
    for size in SIZES:
        if size <= most:
            yield "best-first", best_first(size)


def _merged(texts: Sequence[Text]) -> Iterator[tuple[str, Cut]]:
    for length in sorted({*range(1, min(MERGED_LEVELS, deepest(texts)) + 1), deepest(texts)}):
        yield "merged", _first_levels(length)


def _first_levels(depth: int) -> Cut:
    def cut(position: Position) -> Sequence[int]:
        return [node for node, level in enumerate(position.levels) if level <= depth]

    return cut
