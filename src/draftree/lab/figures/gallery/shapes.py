"""Shapes of drafts: trees and their budgets, widths, merged drafters, candidates of lookahead."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import ROOT
from draftree.drafters import DRAFTERS
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, band, grouped, heat_map, legend, printable
from draftree.lab.figures.measures import (
    BARS,
    Cut,
    Position,
    Replayed,
    Text,
    best_first,
    by_drafters,
    chain,
    deepest,
    expansion,
    k_ary,
    measured_on,
    ratio,
    replay,
    texts_of,
    tokens_per_pass,
    tokens_per_round,
    watched,
    widest,
    worst_text,
)

SIZES = (1, 2, 4, 8, 16, 32, 64)
MERGED_LEVELS = 4
"""Levels of merged trees that are drawn, besides the whole tree."""
FAMILIES = {
    "chain": (INK["measured"], "o", "-"),
    "k-ary, k = 2": (INK["other"], "s", "--"),
    "expansion": (INK["good"], "^", "-."),
    "best-first": ("#b58900", "D", "-"),
    "merged": ("#2a97b5", "v", "--"),
    "oracle": (INK["theory"], "x", ":"),
}


@final
class TreeBudget(Figure):
    """Tokens per pass against the number of drafted nodes: chains, k-ary trees, expansions, best-first, merged, oracle.

    The oracle drafts only the accepted nodes of the wide tree, so none of its parts (chain, k-ary, expansion) does
    better. The drafts of best-first and merged trees are others, which it does not bound.
    """

    title = "Tokens per pass against the budget of drafted nodes"
    runs = ("watch", "best", "merged")

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        merged = material.one("merged")
        rows: list[dict[str, Any]] = []
        for source, cuts in ((trace, _shapes), (material.one("best"), _best), (merged, _merged)):
            texts = texts_of(source)
            for family, cut in cuts(texts):
                budget = max((len(set(cut(p))) for text in texts for p in text.positions), default=0)
                rows.append({"family": family, "budget": budget, **_counts([replay(text, cut) for text in texts])})
        losing = next(row for row in rows if row["family"] == "chain" and row["budget"] == 1)
        most = max((row for row in rows if row["family"] != "oracle"), key=lambda row: row["nodes"])
        gain = most["tokens"] / losing["tokens"]
        return Data(
            rows,
            measured_on(trace, what="Exact replay of trees")
            + f"; merged: {merged.header.draft}; oracle: only the accepted nodes of the wide tree, the bound of its "
            f"parts (chain, k-ary, expansion); best-first and merged draft other nodes{BARS}",
            f"{most['nodes']:.0f} nodes per pass write {gain:.2f} times the tokens of one node; "
            + worst_text(texts_of(trace), chain(4), "a chain of 4", text_of=trace.text_of),
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        families = grouped(data.rows, "family")
        for family, series in FAMILIES.items():
            rows = families.get(family, [])
            label = "oracle of the wide tree" if family == "oracle" else family
            band(axes, [row["nodes"] for row in rows], rows, "tokens", label=label, series=series)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.set(xlabel="drafted nodes per pass", ylabel="tokens per pass, bonus included")
        legend(axes)


def _counts(runs: Sequence[Replayed]) -> dict[str, float]:
    nodes = sum(run.nodes for run in runs) / sum(run.rounds for run in runs)
    return {"nodes": nodes, **tokens_per_pass(runs).row("tokens")}


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
        yield "oracle", partial(_accepted, size=size)


def _accepted(position: Position, size: int) -> Sequence[int]:
    return position.path[:size]


def _best(texts: Sequence[Text]) -> Iterator[tuple[str, Cut]]:
    most = max((len(p.tree) for text in texts for p in text.positions), default=0)
    for size in SIZES:
        if size <= most:
            yield "best-first", best_first(size)


def _merged(texts: Sequence[Text]) -> Iterator[tuple[str, Cut]]:
    for depth in sorted({*range(1, min(MERGED_LEVELS, deepest(texts)) + 1), deepest(texts)}):
        yield "merged", by_drafters(None, depth)


SHOWN = 14
"""Nodes of a drawn tree: the ones with the best scores."""


@final
class Trees(Figure):
    title = "Drafted trees and the walk of the target tokens"
    runs = ("watch",)
    size = (9.0, 7.5)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        places = [
            (text, at)
            for text in texts_of(trace)
            for at in range(2, len(text.positions) - 1)
            if len(text.positions[at].tree)
        ]
        if not places:
            raise ConfigurationError("the trace has no drafted nodes: there is no tree to draw")
        length = {len(text.positions[at].path): (text, at) for text, at in reversed(places)}
        middle = sorted(length)[len(length) // 2]
        rows: list[dict[str, Any]] = []
        for number, wanted in enumerate(dict.fromkeys((max(length), middle, min(length)))):
            text, at = length[wanted]
            position = text.positions[at]
            before = "".join(map(trace.text_of, text.tokens[max(0, at - 4) : at]))
            root = {"tree": number, "node": ROOT, "parent": "", "depth": 0, "text": before, "accepted": True}
            rows.append(root | {"pick": trace.text_of(text.tokens[at])})
            rows += [
                {
                    "tree": number,
                    "node": node,
                    "parent": position.tree.parents[node],
                    "depth": position.levels[node],
                    "text": trace.text_of(position.tree.tokens[node]),
                    "accepted": node in position.path,
                    "pick": "",
                }
                for node in sorted({*best_first(SHOWN)(position), *position.path})
            ]
        share = sum(not text.positions[at].path for text, at in places) / len(places)
        return Data(
            rows,
            measured_on(trace, what=f"Drafts at three positions, the {SHOWN} nodes with the best scores of each"),
            f"at {share:.0%} of the positions no drafted token is accepted, as in the last tree",
        )

    def draw(self, figure: Any, data: Data) -> None:
        trees = grouped(data.rows, "tree").values()
        for axes, rows in zip(figure.subplots(len(trees), 1, squeeze=False)[:, 0], trees, strict=True):
            _draw_tree(axes, rows)


def _draw_tree(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    children = grouped(rows, "parent")
    heights: dict[int, float] = {}
    leaves = itertools.count()

    def place(node: int) -> None:
        """Give leaves the next free height, and other nodes the mean of their children's."""
        below = [child["node"] for child in children.get(node, ())]
        for child in below:
            place(child)
        heights[node] = sum(heights[child] for child in below) / len(below) if below else float(next(leaves))

    place(ROOT)
    for row in rows[1:]:
        colour, width = (INK["good"], 2.0) if row["accepted"] else ("#c3c9d0", 0.8)
        y = (heights[row["parent"]], heights[row["node"]])
        axes.plot((row["depth"] - 1, row["depth"]), y, color=colour, linewidth=width)
    for row in rows:
        edge, face = (INK["good"], "#dafbe1") if row["accepted"] else ("#8c959f", "white")
        box = {"boxstyle": "round,pad=0.25", "facecolor": face, "edgecolor": edge, "linewidth": 0.8}
        style = {"ha": "center", "va": "center", "fontsize": 7, "family": "monospace"}
        axes.text(row["depth"], heights[row["node"]], shown(row["text"]), bbox=box, **style)
    accepted = sum(bool(row["accepted"]) for row in rows) - 1
    note = f"{accepted} accepted" if accepted else f"nothing accepted: the target writes {shown(rows[0]['pick'])}"
    axes.set_title(note, fontsize=8, loc="left")
    axes.set_xlim(-0.6, max(row["depth"] for row in rows) + 0.6)
    axes.set_ylim(-0.8, max(heights.values()) + 0.8)
    axes.axis("off")


def shown(text: str) -> str:
    """Return the end of a text with its spaces and line breaks visible."""
    return printable(text[-24:]) or "(start)"


LEVELS = 5
MAX_WIDTH = 8


@final
class WidthMerged(Figure):
    title = "Width of one drafter, and number of merged drafters, at five levels"
    runs = ("watch", "merged")
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        wide, merged = material.one("watch"), material.one("merged")
        texts = texts_of(wide)
        others = texts_of(merged)
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
            for before, after in itertools.pairwise(rows)
            if after["kind"] == "merged" and after["number"] > 1
        ]
        least = min(gains, default=(0.0, "nothing"))
        return Data(
            rows,
            measured_on(wide, what=f"Exact replay, {levels} levels")
            + f"; merged: {merged.header.draft}, up to {LEVELS} levels each{BARS}",
            f"adding {least[1]} changes tokens per pass by {least[0]:+.3f}",
        )

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, kind, colour in ((left, "width", INK["measured"]), (right, "merged", INK["other"])):
            rows = grouped(data.rows, "kind")[kind]
            band(axes, [row["number"] for row in rows], rows, "tokens", label=kind, series=(colour, "o", "-"))
            for row in rows:
                note = f"{row['nodes']:.1f} nodes" + (f"\n+ {row['added'].split(':')[0]}" if row["added"] else "")
                place = (row["number"], row["tokens_low"])
                axes.annotate(note, place, (0, -14), textcoords="offset points", ha="center", va="top", fontsize=6)
            axes.set_xticks([row["number"] for row in rows])
            axes.margins(x=0.1, y=0.3)
        right.yaxis.set_tick_params(labelleft=True)
        left.set(xlabel="children of the root", ylabel="tokens per pass, bonus included")
        right.set(xlabel="merged drafters")


WIDTHS = (1, 2, 4, 8)


@final
class VerifiedCdf(Figure):
    """Cumulative distribution of the tokens that one round writes, for trees of several widths.

    Source: SpecInfer, arXiv 2305.09781, figure 9, of the average verified tokens by tree width.
    """

    title = "Verified tokens per round (cumulative distribution)"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
        depth = deepest(texts)
        width = widest(texts)
        rows: list[dict[str, Any]] = []
        for first in [first_width for first_width in WIDTHS if first_width <= width]:
            runs = [replay(text, expansion(first, *[1] * (depth - 1))) for text in texts]
            counts = [Counter(count + 1 for count in run.accepted) for run in runs]
            for tokens in range(1, depth + 2):
                below = [sum(n for value, n in count.items() if value <= tokens) for count in counts]
                share = ratio(below, [run.rounds for run in runs])
                rows.append({"width": first, "tokens": tokens, **share.row("share")})
        ones = [row for row in rows if row["tokens"] == 1]
        return Data(
            rows,
            measured_on(trace, what=f"Exact replay of trees with 1 to {width} children of the root, {depth} levels")
            + "; shaded: 95% over texts",
            f"with one child {ones[0]['share']:.0%} of the rounds write only one token, as plain decoding does",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        for (width, rows), (colour, _, line) in zip(grouped(data.rows, "width").items(), SERIES, strict=False):
            x = [0, *(row["tokens"] for row in rows)]
            values, low, high = ([0.0, *(row[name] for row in rows)] for name in ("share", "share_low", "share_high"))
            axes.step(x, values, where="post", color=colour, linestyle=line, label=f"width {width}")
            axes.fill_between(x, low, high, step="post", color=colour, alpha=0.12, linewidth=0)
        axes.set(xlabel="tokens of a round, bonus included", ylabel="share of rounds with at most so many", ylim=(0, 1))
        legend(axes, loc="lower right")


@final
class LookaheadGrid(Figure):
    """Tokens per pass of the lookahead drafter by length of its n-grams and number of candidates.

    Source: arXiv 2402.02057, and its pool of n-grams without a window.
    """

    title = "Lookahead: tokens per pass by length and number of n-grams"
    runs = ("lookahead",)

    def data(self, material: Material) -> Data:
        traces = material.all("lookahead")
        rows: list[dict[str, Any]] = []
        for trace in traces:
            options = dict(DRAFTERS.parse(trace.header.draft)[0].options)
            row = {name: int(options[name]) for name in ("n", "candidates")}
            nodes = [len(step.scored) for traced_round in trace.rounds for step in traced_round.steps]
            rows.append({**row, "nodes_per_pass": sum(nodes) / len(nodes), **tokens_per_round(trace).row("tokens")})
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
        values = [[cells[n, k]["tokens"] for k in kept] for n in grams]
        labels = [
            [
                "{tokens:.2f}\n({tokens_low:.2f}–{tokens_high:.2f})\n{nodes_per_pass:.1f} nodes".format(**cells[n, k])
                for k in kept
            ]
            for n in grams
        ]
        names = {"columns": [str(k) for k in kept], "rows": [f"{n}-grams" for n in grams]}
        image = heat_map(axes, values, labels, **names, fontsize=7, cmap="Blues", aspect="auto")
        axes.set_xlabel("candidates K of a token")
        figure.colorbar(image, ax=axes, label="tokens per pass")
