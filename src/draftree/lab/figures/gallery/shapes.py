"""Shapes of drafts: trees and their budgets, widths, merged drafters, candidates of lookahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.registry import Spec
from draftree.core.tree import ROOT
from draftree.drafters import DRAFTERS
from draftree.engine.trace import Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, band, ink_on, legend, printable
from draftree.lab.figures.measures import (
    Cut,
    Position,
    Text,
    best_first,
    by_drafters,
    chain,
    deepest,
    estimates,
    expansion,
    k_ary,
    measured_on,
    ratio,
    replay,
    texts_of,
    tokens_per_pass,
    tokens_per_round,
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
    """Tokens per pass against the number of drafted nodes: chains, k-ary trees, expansions, best-first, merged, oracle.

    The oracle drafts only the accepted nodes of the wide tree, so none of its parts (chain, k-ary, expansion) does
    better. The drafts of best-first and merged trees are others, which it does not bound.
    """

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


SHOWN = 14
"""Nodes of a drawn tree: the ones with the best scores."""


@final
class Trees(Figure):
    title = "Drafted trees and the walk of the target tokens"
    runs = ("watch",)
    size = (9.0, 7.5)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        places = [(text, at) for text in texts_of(trace) for at in range(2, len(text.positions) - 1)]
        places = [(text, at) for text, at in places if len(text.positions[at].tree)]
        if not places:
            raise ConfigurationError("the trace has no drafted nodes: there is no tree to draw")
        length = {len(text.positions[at].path): (text, at) for text, at in reversed(places)}
        middle = sorted(length)[len(length) // 2]
        rows: list[dict[str, Any]] = []
        for number, wanted in enumerate(dict.fromkeys((max(length), middle, min(length)))):
            text, at = length[wanted]
            before = "".join(trace.text_of(token) for token in text.tokens[max(0, at - 4) : at])
            pick = trace.text_of(text.tokens[at])
            rows += _rows(number, text.positions[at], before, pick, {t: trace.text_of(t) for t in _tokens(text, at)})
        share = sum(not text.positions[at].path for text, at in places) / len(places)
        return Data(
            rows,
            measured_on(trace, what=f"Drafts at three positions, the {SHOWN} nodes with the best scores of each"),
            f"at {share:.0%} of the positions no drafted token is accepted, as in the last tree",
        )

    def draw(self, figure: Any, data: Data) -> None:
        numbers = list(dict.fromkeys(row["tree"] for row in data.rows))
        for axes, number in zip(figure.subplots(len(numbers), 1, squeeze=False)[:, 0], numbers, strict=True):
            _draw_tree(axes, [row for row in data.rows if row["tree"] == number])


def _tokens(text: Any, at: int) -> set[int]:
    return set(text.positions[at].tree.tokens)


def _rows(number: int, position: Position, before: str, pick: str, texts: Mapping[int, str]) -> list[dict[str, Any]]:
    tree = position.tree
    kept = sorted({*best_first(SHOWN)(position), *position.path})
    head = {"tree": number, "node": ROOT, "parent": "", "depth": 0, "text": before, "accepted": True, "pick": pick}
    return [
        head,
        *(
            {
                "tree": number, "node": node, "parent": tree.parents[node], "depth": position.levels[node],
                "text": texts[tree.tokens[node]], "accepted": node in position.path, "pick": "",
            }
            for node in kept
        ),
    ]  # fmt: skip


def _draw_tree(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    children: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        children.setdefault(row["parent"], []).append(row)
    heights: dict[int, float] = {}
    _place(rows[0], children, heights, [0.0])
    by_node = {row["node"]: row for row in rows}
    for row in rows:
        x = row["depth"]
        y = heights[row["node"]]
        if row["parent"] != "":
            colour, width = (INK["good"], 2.0) if row["accepted"] else ("#c3c9d0", 0.8)
            axes.plot((by_node[row["parent"]]["depth"], x), (heights[row["parent"]], y), color=colour, linewidth=width)
    for row in rows:
        edge = INK["good"] if row["accepted"] else "#8c959f"
        face = "#dafbe1" if row["accepted"] else "white"
        label = shown(row["text"])
        axes.text(
            row["depth"], heights[row["node"]], label, ha="center", va="center", fontsize=7, family="monospace",
            bbox={"boxstyle": "round,pad=0.25", "facecolor": face, "edgecolor": edge, "linewidth": 0.8},
        )  # fmt: skip
    accepted = sum(bool(row["accepted"]) for row in rows) - 1
    note = f"{accepted} accepted" if accepted else f"nothing accepted: the target writes {shown(rows[0]['pick'])}"
    axes.set_title(note, fontsize=8, loc="left")
    axes.set_xlim(-0.6, max(row["depth"] for row in rows) + 0.6)
    axes.set_ylim(-0.8, max(heights.values()) + 0.8)
    axes.axis("off")


def _place(row: Mapping[str, Any], children: Any, heights: dict[int, float], free: list[float]) -> None:
    """Give leaves the next free height, and other nodes the mean of their children's."""
    below = children.get(row["node"], ())
    for child in below:
        _place(child, children, heights, free)
    if below:
        heights[row["node"]] = sum(heights[child["node"]] for child in below) / len(below)
    else:
        heights[row["node"]] = free[0]
        free[0] = free[0] + 1


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
            for before, after in pairwise(rows)
            if after["kind"] == "merged" and after["number"] > 1
        ]
        least = min(gains, default=(0.0, "nothing"))
        return Data(
            rows,
            measured_on(wide, what=f"Exact replay, {levels} levels")
            + f"; merged: {merged.header.draft}, up to {LEVELS} "
            "levels each; bars: 95% over texts",
            f"adding {least[1]} changes tokens per pass by {least[0]:+.3f}",
        )

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, kind, colour in ((left, "width", INK["measured"]), (right, "merged", INK["other"])):
            rows = [row for row in data.rows if row["kind"] == kind]
            band(axes, [row["number"] for row in rows], estimates(rows, "tokens"), label=kind, colour=colour)
            for row in rows:
                note = f"{row['nodes']:.1f} nodes" + (f"\n+ {row['added'].split(':')[0]}" if row["added"] else "")
                place = (row["number"], row["tokens_low"])
                axes.annotate(note, place, (0, -14), textcoords="offset points", ha="center", va="top", fontsize=6)
            axes.set_xticks([row["number"] for row in rows])
            axes.margins(x=0.1, y=0.3)
        right.yaxis.set_tick_params(labelleft=True)
        left.set(xlabel="children of the root", ylabel="tokens per pass, bonus included")
        right.set(xlabel="merged drafters")


def _counts(runs: Any) -> dict[str, float]:
    nodes = sum(run.nodes for run in runs) / sum(run.rounds for run in runs)
    return {"nodes": nodes, **tokens_per_pass(runs).row("tokens")}


WIDTHS = (1, 2, 4, 8)


@final
class VerifiedCdf(Figure):
    """Cumulative distribution of the tokens that one round writes, for trees of several widths.

    Source: SpecInfer, arXiv 2305.09781, figure 9, of the average verified tokens by tree width.
    """

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
            low = [0.0, *(row["share_low"] for row in rows)]
            high = [0.0, *(row["share_high"] for row in rows)]
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
            options = dict(_spec(trace.header.draft).options)
            steps = [step for one in trace.rounds for step in one.steps]
            nodes = sum(len(step.scored) for step in steps) / len(steps)
            grams = int(options["n"])
            kept = int(options["candidates"])
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
