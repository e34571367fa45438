"""Drawings of drafted trees with the walk of the verifier: a good, a middle and a losing round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import ROOT
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, printable
from draftree.lab.figures.measures import Position, best_first, measured_on, texts_of

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
