"""Trees made from other trees: where the nodes of one are in the other, and merged drafts.

A `NodeMap` is made once and moves every per-node value, so that no caller renumbers by hand.
`merge` shares common prefixes of several drafts; `join` keeps every draw, for verifiers that compare distributions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor

from draftree.core.tree import ROOT, Draw, TokenTree, depths, path
from draftree.core.types import Verdict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeMap:
    """Where the nodes of a tree, the source, are in a derived tree. The root is the derived tree's root.

    The parent of a mapped node is mapped to the parent of its target, or is the root.
    """

    parents: tuple[int, ...]  # of the source's nodes
    # node of the derived tree for every source node; None where there is none. Source nodes with the same tokens
    # from the root down may have the same target
    targets: tuple[int | None, ...]
    num_targets: int  # nodes of the derived tree
    root: int = ROOT  # the source node that is the derived tree's root: the last one of a committed path, else ROOT

    @classmethod
    def identity(cls, parents: Sequence[int]) -> NodeMap:
        return cls(tuple(parents), tuple(range(len(parents))), len(parents))

    @classmethod
    def keeping(cls, parents: Sequence[int], keep: Iterable[int], *, root: int = ROOT) -> NodeMap:
        """Only some nodes stay, in their old order."""
        targets: list[int | None] = [None] * len(parents)
        kept = sorted(set(keep))
        for new, node in enumerate(kept):
            if not 0 <= node < len(parents):
                raise ValueError(
                    f"node {node} is kept, but there are {len(parents)} nodes: name 0 to {len(parents) - 1}"
                )
            parent = parents[node]
            if parent != root and (parent == ROOT or targets[parent] is None):
                raise ValueError(f"node {node} is kept but its parent {parent} is not")
            targets[node] = new
        return cls(tuple(parents), tuple(targets), len(kept), root)

    @classmethod
    def below(cls, parents: Sequence[int], root: int) -> NodeMap:
        """Only what is below a node stays; that node is the derived tree's root."""
        known = {root}
        for node, parent in enumerate(parents):
            if parent in known:
                known.add(node)
        return cls.keeping(parents, known - {root}, root=root)

    @classmethod
    def by_tokens(
        cls, tokens: Sequence[int], parents: Sequence[int], known: Mapping[tuple[int, int], int], *, num_targets: int
    ) -> NodeMap:
        """Every node is mapped to the node with the same tokens from the root down."""
        targets: list[int | None] = []
        for token, parent in zip(tokens, parents, strict=True):
            above = ROOT if parent == ROOT else targets[parent]
            targets.append(None if above is None else known.get((above, int(token))))
        return cls(tuple(parents), tuple(targets), num_targets)

    def widened(self, num_targets: int) -> NodeMap:
        """The same map into a tree with more nodes, which have no source."""
        return replace(self, num_targets=num_targets)

    def compose(self, then: NodeMap) -> NodeMap:
        """A map followed by another one, whose source is the derived tree of the first."""
        targets = tuple([None if target is None else then.targets[target] for target in self.targets])
        root = self.root if then.root == ROOT else self.sources[then.root]
        assert root is not None, "the root of a composed map has a source"
        return NodeMap(self.parents, targets, then.num_targets, root)

    @property
    def sources(self) -> list[int | None]:
        """For every derived node the first source node that is mapped to it; None without."""
        first = {target: node for node, target in reversed(list(enumerate(self.targets)))}
        return [first.get(target) for target in range(self.num_targets)]

    @property
    def kept(self) -> list[int]:
        return [node for node, target in enumerate(self.targets) if target is not None]

    @property
    def derived_parents(self) -> list[int]:
        """Parents of the mapped nodes in the derived tree, where no two have one target and none was added."""
        places = [*self.targets, ROOT]  # ROOT is the last index
        places[self.root] = ROOT
        return [parent for node in self.kept if (parent := places[self.parents[node]]) is not None]

    def cut(self, tree: TokenTree) -> TokenTree:
        if self.root == ROOT and self.num_targets == len(tree):
            return tree
        kept = self.kept
        return TokenTree(
            tuple([tree.tokens[node] for node in kept]),
            tuple(self.derived_parents),
            tuple([tree.scores[node] for node in kept]) if tree.scores else (),
            tree.draw,
            None if tree.distributions is None else tree.distributions[kept],
            tuple([tree.sources[node] for node in kept]) if tree.sources else (),
        )

    def apply(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """A path of the source in the derived tree, below its root, up to the first node that is not mapped."""
        if self.root != ROOT:
            nodes = nodes[nodes.index(self.root) + 1 :] if self.root in nodes else ()
        targets = takewhile(lambda target: target is not None, (self.targets[node] for node in nodes))
        return tuple(target for target in targets if target is not None)

    def carry(self, values: Mapping[int, T]) -> dict[int, T]:
        """Values by source node as values by derived node; those of nodes that are not mapped are dropped."""
        return {target: value for node, value in values.items() if (target := self.targets[node]) is not None}

    def path_on_source(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """A path of the derived tree in the source, from the source's root up to the first node without a source."""
        sources, last = self.sources, self.root
        for node in nodes:
            source = sources[node]
            if source is None:
                break
            last = source
        return tuple(path(self.parents, last))

    def picks_on_source(self, picks: Sequence[int | None]) -> tuple[int | None, ...]:
        """Picks by row of the derived tree as picks by row of the source; None where no row was scored."""
        if not picks:
            return ()
        rows = [None, *(None if target is None else picks[1 + target] for target in self.targets)]
        rows[1 + self.root] = picks[0]
        return tuple(rows)

    def verdict_on_source(self, verdict: Verdict) -> Verdict:
        """A verdict on the derived tree as one on the source."""
        return Verdict(self.path_on_source(verdict.path), verdict.bonus, self.picks_on_source(verdict.picks))


def prune(tree: TokenTree, keep: Iterable[int]) -> TokenTree:
    """The tree of the nodes in `keep`, in their old order; a kept node needs its parent kept."""
    return NodeMap.keeping(tree.parents, keep).cut(tree)


def first_levels(parents: Sequence[int], num_nodes: int) -> NodeMap:
    """Only the first `num_nodes` nodes stay, level by level; depends on no token."""
    if len(parents) <= num_nodes:
        return NodeMap.identity(parents)
    level = depths(parents)
    return NodeMap.keeping(parents, sorted(range(len(parents)), key=lambda node: (level[node], node))[:num_nodes])


@dataclass(frozen=True, slots=True)
class MergedTree:
    tree: TokenTree  # the merged tree
    maps: tuple[NodeMap, ...]  # where the nodes of each of the several trees are in it


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

    `names`: one name per tree; a node lists the names of all trees that proposed it. `vocab_size`: width of the
    distributions; a point draw gets a one-hot distribution.
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
        distributions = tree.distributions
        is_point = tree.distributions is None
        if distributions is None:
            chosen = torch.tensor(tree.tokens, dtype=torch.long).unsqueeze(-1)
            distributions = torch.zeros(len(tree), vocab_size).scatter_(-1, chosen, 1.0)
        places: list[int] = []
        for node, (row, token, parent) in enumerate(zip(distributions.cpu(), tree.tokens, tree.parents, strict=True)):
            above = ROOT if parent == ROOT else places[parent]
            twin = self.first.get((above, token))
            if twin is not None and is_point:
                self._name(twin, _names_of(tree, node, name))
            else:
                gain = tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent]) if tree.scores else 0.0
                score = gain + (0.0 if above == ROOT else self.scores[above])
                place = self._append(above, token, score, _names_of(tree, node, name))
                self.distributions.append(row)
                twin = place if twin is None else twin
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
        tree = TokenTree(
            tuple(self.tokens),
            tuple(self.parents),
            tuple(self.scores),
            draw,
            torch.stack(self.distributions) if self.distributions else None,
            tuple(self.sources),
        )
        pairs = zip(trees, places, strict=True)
        return MergedTree(tree, tuple([NodeMap(part.parents, tuple(nodes), len(tree)) for part, nodes in pairs]))


def _names_of(tree: TokenTree, node: int, name: str) -> tuple[str, ...]:
    return tuple(f"{name}/{source}" for source in tree.sources[node]) if tree.sources else (name,)
