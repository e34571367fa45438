"""Merging trees: `merge` shares common prefixes, `join` keeps every draw for rules that compare draft distributions.

Two facts keep the target's distribution where trees are joined. A child is a draw from the distribution that it
carries, given its path and what was tried before it. And where a rule rejects a child it subtracts that distribution,
whatever the token was, so the rest may depend on the token: a later child with the same token has nothing left and is
never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftree.core.node_map import NodeMap
from draftree.core.tree import ROOT, Draw, TokenTree


@dataclass(frozen=True, slots=True)
class MergedTree:
    """One tree made of several.

    Attributes:
        tree: the merged tree.
        maps: where the nodes of each of the several trees are in it.
    """

    tree: TokenTree
    maps: tuple[NodeMap, ...]


def merge(trees: Sequence[TokenTree], names: Sequence[str]) -> MergedTree:
    """One tree that holds every path of all; common prefixes are shared, and a node names all that drafted it.

    A drafter that tells its own sources apart is named with them, as "name/source". A shared node has the highest of
    its scores; a tree without scores counts as certain. Draft distributions are lost: a shared node is no draw of any
    of them.
    """
    merged = _Growing()
    places = [merged.add_shared(tree, name) for tree, name in zip(trees, names, strict=True)]
    return merged.result(trees, places, Draw.FREE)


def join(trees: Sequence[TokenTree], names: Sequence[str], *, vocab_size: int) -> MergedTree:
    """One tree that holds the draws of all, each with the distribution that it was drawn from.

    Draws from a distribution precede point draws, which add acceptance where the former are rejected. A child with the
    token of an earlier sibling is never accepted itself, so its descendants are attached to that sibling. A point draw
    is merged into such a sibling; a draw from a distribution is kept, because dropping it would condition on its value.

    Args:
        trees: trees of point or independent draws.
        names: one name per tree; a node lists the names of all trees that proposed it.
        vocab_size: width of the distributions; a point draw gets a one-hot distribution.
    """
    joined = _Growing()
    order = sorted(range(len(trees)), key=lambda part: trees[part].distributions is None)
    places = {part: joined.add_draws(trees[part], names[part], vocab_size) for part in order}
    return joined.result(trees, [places[part] for part in range(len(trees))], Draw.IID)


@dataclass(slots=True)
class _Growing:
    """A merged tree while it grows, with the first child of each token at each node. Mutated by its methods only."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    sources: list[tuple[str, ...]] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    first: dict[tuple[int, int], int] = field(default_factory=dict)

    def add_shared(self, tree: TokenTree, name: str) -> list[int]:
        """Add the nodes of one tree that are not there yet; where its nodes are."""
        places: list[int] = []
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            above = ROOT if parent == ROOT else places[parent]
            score = tree.scores[node] if tree.scores else 0.0
            place = self.first.get((above, token))
            if place is None:
                place = self._append(above, token, score, _names_of(tree, node, name))
            else:
                self.scores[place] = max(self.scores[place], score)
                self._name(place, _names_of(tree, node, name))
            places.append(place)
        return places

    def add_draws(self, tree: TokenTree, name: str, vocab_size: int) -> list[int]:
        """Add the draws of one tree; for its nodes the first node of their token; see `join`."""
        is_point = tree.distributions is None
        distributions = _point_distributions(tree, vocab_size) if tree.distributions is None else tree.distributions
        places: list[int] = []
        for node, (row, token, parent) in enumerate(zip(distributions.cpu(), tree.tokens, tree.parents, strict=True)):
            above = ROOT if parent == ROOT else places[parent]
            twin = self.first.get((above, token))
            if twin is not None and is_point:
                self._name(twin, _names_of(tree, node, name))
            else:
                gain = tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent]) if tree.scores else 0.0
                score = gain + (0.0 if above == ROOT else self.scores[above])
                own = self._append(above, token, score, _names_of(tree, node, name))
                self.distributions.append(row)
                twin = own if twin is None else twin
            places.append(twin)
        return places

    def _append(self, parent: int, token: int, score: float, names: tuple[str, ...]) -> int:
        node = len(self.tokens)
        self.first.setdefault((parent, token), node)
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.sources.append(names)
        return node

    def _name(self, node: int, names: tuple[str, ...]) -> None:
        self.sources[node] = tuple(dict.fromkeys((*self.sources[node], *names)))

    def result(self, trees: Sequence[TokenTree], places: Sequence[Sequence[int]], draw: Draw) -> MergedTree:
        """The tree, and where the nodes of its parts are."""
        tree = TokenTree(
            tuple(self.tokens),
            tuple(self.parents),
            tuple(self.scores),
            draw,
            torch.stack(self.distributions) if self.distributions else None,
            tuple(self.sources),
        )
        pairs = zip(trees, places, strict=True)
        return MergedTree(tree, tuple([NodeMap(part.parents, tuple(own), len(tree)) for part, own in pairs]))


def _names_of(tree: TokenTree, node: int, name: str) -> tuple[str, ...]:
    return tuple(f"{name}/{source}" for source in tree.sources[node]) if tree.sources else (name,)


def _point_distributions(tree: TokenTree, vocab_size: int) -> Tensor:
    chosen = torch.tensor(tree.tokens, dtype=torch.long).unsqueeze(-1)
    return torch.zeros(len(tree), vocab_size).scatter_(-1, chosen, 1.0)
