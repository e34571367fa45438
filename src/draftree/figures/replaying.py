"""Exact replay of smaller trees on a trace with a draft at every position of the text. No torch.

Under a rule that keeps the text, a smaller tree accepts those nodes of the accepted path that it contains. So one
recorded run gives the rounds of every tree that can be cut from the recorded ones: chains, k-ary trees, expansions, the
best nodes, and the trees of some of the merged drafters. Cut trees equal those that the drafter makes itself only where
it ranks children independently of the size of the tree; all model drafters here do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from draftree.analysis.held import is_by
from draftree.analysis.simulator import Script, scripts_of
from draftree.analysis.trace import Trace
from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, ROOT, TokenTree, depths, follow

__all__ = [
    "Cut", "Position", "Replayed", "Text", "best_first", "by_drafters", "chain", "expansion", "k_ary", "replay",
    "texts_of",
]  # fmt: skip

Cut = Callable[["Position"], Collection[int]]
"""Chooses the nodes of a position's tree that are drafted."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a text.

    Attributes:
        tree: the draft there.
        levels: depth of each node.
        ranks: place of each node among its siblings in draft order, from 1.
        path: nodes of the text that the tree contains, from the root down.
    """

    tree: TokenTree
    levels: tuple[int, ...]
    ranks: tuple[int, ...]
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """One recorded text: a position for each of its tokens, and the text of the tokens."""

    name: str
    positions: tuple[Position, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Counts of one text: rounds, written tokens, drafted nodes, and accepted nodes of every round."""

    rounds: int
    tokens: int
    nodes: int
    accepted: tuple[int, ...]


_KEPT: dict[int, tuple[Trace, tuple[Text, ...]]] = {}
"""Texts of the last traces, by the identity of the trace."""
MAX_KEPT = 8


def texts_of(trace: Trace) -> tuple[Text, ...]:
    """Return the texts of a trace of the planner `watch`, in order.

    Raises:
        ConfigurationError: a position has no draft, or the rule does not keep the text.
    """
    if trace.header.verify.split(",")[0] not in ("coupled", "match"):
        raise ConfigurationError(
            f"a trace verified by '{trace.header.verify}' cannot be replayed: record it with coupled or match"
        )
    kept = _KEPT.get(id(trace))
    if kept is None or kept[0] is not trace:
        if len(_KEPT) >= MAX_KEPT:
            _KEPT.clear()
        kept = _KEPT[id(trace)] = trace, tuple(map(_text, scripts_of(trace)))
    return kept[1]


def _text(script: Script) -> Text:
    positions = []
    while not script.is_done:
        step = script.steps.get(script.place)
        if step is None:
            raise ConfigurationError(
                f"'{script.name}' has no draft at position {script.place}: record with --plan watch"
            )
        positions.append(_position(step.tree, script.coming()))
        script.place += 1
    return Text(script.name, tuple(positions), tuple(script.text))


def _position(tree: TokenTree, coming: Sequence[int]) -> Position:
    count, ranks = [0] * (len(tree) + 1), []
    for parent in tree.parents:
        count[parent + 1] += 1
        ranks.append(count[parent + 1])
    path = follow(tree, coming[:-1]) if len(tree) else ()
    return Position(tree if len(tree) else EMPTY, tuple(depths(tree.parents)), tuple(ranks), tuple(path))


def replay(text: Text, cut: Cut) -> Replayed:
    """Return the counts of a text whose rounds draft what `cut` chooses."""
    at, nodes, accepted = 0, 0, list[int]()
    while at < len(text.positions):
        position = text.positions[at]
        kept = set(cut(position))
        count = 0
        while count < len(position.path) and position.path[count] in kept:
            count += 1
        count = min(count, len(text.positions) - at - 1)
        nodes += len(kept)
        accepted.append(count)
        at += count + 1
    return Replayed(len(accepted), len(text.positions), nodes, tuple(accepted))


def expansion(*widths: int) -> Cut:
    """Return a cut to the first children of each node, as many as the width of their level."""

    def cut(position: Position) -> Collection[int]:
        kept = {ROOT}
        for node, (parent, level, rank) in enumerate(
            zip(position.tree.parents, position.levels, position.ranks, strict=True)
        ):
            if parent in kept and level <= len(widths) and rank <= widths[level - 1]:
                kept.add(node)
        return kept - {ROOT}

    return cut


def chain(length: int) -> Cut:
    """Return a cut to the first child of each node."""
    return expansion(*[1] * length)


def k_ary(width: int, depth: int) -> Cut:
    """Return a cut to the first `width` children of each node."""
    return expansion(*[width] * depth)


def best_first(num_nodes: int) -> Cut:
    """Return a cut to the nodes with the best scores; trees without scores are cut in their own order."""

    def cut(position: Position) -> Collection[int]:
        scores = position.tree.scores or [-float(node) for node in range(len(position.tree))]
        kept = {ROOT}
        for node in sorted(range(len(position.tree)), key=lambda node: (-scores[node], node)):
            if len(kept) <= num_nodes and position.tree.parents[node] in kept:
                kept.add(node)
        return kept - {ROOT}

    return cut


def by_drafters(names: Sequence[str], depth: int) -> Cut:
    """Return a cut to the nodes that one of these drafters proposed, down to a depth."""

    def cut(position: Position) -> Collection[int]:
        tree = position.tree
        return [
            node
            for node in range(len(tree))
            if position.levels[node] <= depth
            and (not tree.sources or any(is_by(tree.sources[node], name) for name in names))
        ]

    return cut
