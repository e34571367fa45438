"""Token trees: what a drafter guesses and a target scores in one pass.

A tree is small host data. Node i has a token and a parent; parents[i] < i, and -1 is the root: the last
written token, which the tree itself does not hold. A chain is the tree with parents [-1, 0, 1, ...].
Nothing here knows a model; every function is pure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1


class Draw(enum.Enum):
    """How the children of a node came to be: what a verifier may conclude from them."""

    FREE = "free"
    """Chosen in any way; no distribution is known."""
    POINT = "point"
    """At most one child a node, chosen with certainty: the draft distribution is one token."""
    IID = "iid"
    """Drawn independently from the draft distribution, in order, duplicates kept."""
    WITHOUT_REPLACEMENT = "without-replacement"
    """Drawn one after another from what is left of the draft distribution, in order."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A tree of guessed tokens.

    Attributes:
        tokens: one token id a node.
        parents: the parent's index a node, -1 for the root; always smaller than the node's own index.
        scores: drafter's log-scores a node (perturbed by the noise where sampling); empty if it has none.
        draw: how children were drawn; siblings stand in draw order.
        distributions: draft distribution that node i was drawn from, shape (nodes, vocab), float; only for draws that
        have one. sources: names of the drafters that guessed node i, or of the places that one drafter took it from;
        empty if
            there is only one drafter and one place.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] = ()
    draw: Draw = Draw.FREE
    distributions: Tensor | None = None
    sources: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree of {len(self.tokens)} tokens has {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parent of node {node} is {parent}: it must be -1 or an earlier node")
        for name, column in (("scores", self.scores), ("sources", self.sources)):
            if column and len(column) != len(self.tokens):
                raise ValueError(f"a tree of {len(self.tokens)} tokens has {len(column)} {name}")

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`; empty for the root (-1)."""
        return path(self.parents, node)

    def token_paths(self) -> list[tuple[int, ...]]:
        """Tokens from the root's child down to every node; entry 0 is the root's, entry 1 + i is node i's."""
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            found.append((*found[parent + 1], token))
        return found

    def children(self) -> list[list[int]]:
        """Children of every node in draw order; entry 0 is the root's, entry 1 + i is node i's."""
        lists: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            lists[parent + 1].append(node)
        return lists


EMPTY = TokenTree((), ())


def chain(
    tokens: Iterable[int],
    *,
    scores: Iterable[float] = (),
    draw: Draw = Draw.FREE,
    distributions: Tensor | None = None,
) -> TokenTree:
    """A tree without branches."""
    row = tuple(int(t) for t in tokens)
    return TokenTree(row, tuple(range(-1, len(row) - 1)), tuple(scores), draw, distributions)


def path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root's child down to `node`, both ends included; empty for the root."""
    nodes: list[int] = []
    while node != ROOT:
        nodes.append(node)
        node = parents[node]
    nodes.reverse()
    return nodes


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node; the root's children have depth 1."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


def is_path(parents: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether these are nodes of the tree, each the child of the one before, the first the root's."""
    return all(
        0 <= node < len(parents) and parents[node] == parent
        for node, parent in zip(nodes, (ROOT, *nodes), strict=False)
    )


def is_rooted(parents: Sequence[int], nodes: Sequence[int], root: int = ROOT) -> bool:
    """Whether these are nodes of the tree, in their order, each with its parent among them or equal to `root`."""
    return all(
        0 <= node < len(parents) and before < node and (parents[node] == root or parents[node] in nodes)
        for node, before in zip(nodes, (ROOT, *nodes), strict=False)
    )


def is_chain(parents: Sequence[int]) -> bool:
    """Whether no node has two children and none is apart from the chain."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """Which node may see which: bool of shape (nodes, nodes), row = the node, column = itself or an ancestor."""
    count = len(parents)
    mask = np.eye(count, dtype=bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def prune(tree: TokenTree, keep: Iterable[int]) -> TokenTree:
    """The tree of the nodes in `keep`, in their old order; a kept node needs its parent kept.

    Raises:
        ValueError: a kept node's parent is not kept.
    """
    kept = sorted(set(keep))
    place = {node: new for new, node in enumerate(kept)}
    place[ROOT] = ROOT
    parents = []
    for node in kept:
        if tree.parents[node] not in place:
            raise ValueError(f"node {node} is kept but its parent {tree.parents[node]} is not")
        parents.append(place[tree.parents[node]])
    return TokenTree(
        tuple(tree.tokens[n] for n in kept),
        tuple(parents),
        tuple(tree.scores[n] for n in kept) if tree.scores else (),
        tree.draw,
        None if tree.distributions is None else tree.distributions[kept],
        tuple(tree.sources[n] for n in kept) if tree.sources else (),
    )


def follow(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """The longest path from the root whose tokens begin `tokens`; the first drafted of twins that reach as far."""
    frontier, reached = [ROOT], ROOT
    children = tree.children()
    for token in tokens:
        frontier = [child for node in frontier for child in children[node + 1] if tree.tokens[child] == token]
        if not frontier:
            break
        reached = frontier[0]
    return tree.path(reached)


def places(tree: TokenTree, whole: TokenTree) -> list[int | None]:
    """For every node the node of `whole` with the same tokens from the root down, the first of twins; None without."""
    known: dict[tuple[int, int], int] = {}
    for node in reversed(range(len(whole))):
        known[whole.parents[node], whole.tokens[node]] = node
    found: list[int | None] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        above = ROOT if parent == ROOT else found[parent]
        found.append(None if above is None else known.get((above, token)))
    return found


def merge(trees: Sequence[TokenTree], names: Sequence[str]) -> TokenTree:
    """One tree that holds every path of all; common prefixes are shared, and a node names all that guessed it.

    A drafter that tells its own sources apart is named with them, as "name/source". A shared node has the highest of
    its scores, a tree without scores counts as sure of itself. Draft distributions are lost: a shared node is no draw
    of any of them.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    sources: list[tuple[str, ...]] = []
    known: dict[tuple[int, int], int] = {}
    for tree, name in zip(trees, names, strict=True):
        place = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            key = (place[parent], token)
            score = tree.scores[node] if tree.scores else 0.0
            own = tuple(f"{name}/{source}" for source in tree.sources[node]) if tree.sources else (name,)
            if key not in known:
                known[key] = len(tokens)
                tokens.append(token)
                parents.append(place[parent])
                scores.append(score)
                sources.append(own)
            else:
                scores[known[key]] = max(scores[known[key]], score)
                sources[known[key]] = tuple(dict.fromkeys((*sources[known[key]], *own)))
            place[node] = known[key]
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores), Draw.FREE, None, tuple(sources))


def first_levels(tree: TokenTree, num_nodes: int) -> TokenTree:
    """The tree without its deepest, latest nodes, so that no more than `num_nodes` are left; looks at no token."""
    if len(tree) <= num_nodes:
        return tree
    level = depths(tree.parents)
    return prune(tree, sorted(range(len(tree)), key=lambda node: (level[node], node))[:num_nodes])
