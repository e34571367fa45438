"""Token trees: the draft of a drafter, scored by the target in one pass.

A tree is small host data. Node i has a token and a parent; parents[i] < i, and -1 is the root: the last
written token, which the tree itself does not hold. A chain is the tree with parents [-1, 0, 1, ...].
The functions are pure and independent of any model.
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
    """How the children of a node were drawn, which decides the verifiers that may be used."""

    FREE = "free"  # chosen in any way; no distribution is known
    POINT = "point"  # at most one child per node, chosen with certainty: the draft distribution is one-hot
    IID = "iid"  # drawn independently from the draft distribution, in order, duplicates kept
    WITHOUT_REPLACEMENT = "without-replacement"
    """Drawn one after another from the remaining draft distribution, in order."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A tree of guessed tokens."""

    tokens: tuple[int, ...]  # one token id per node
    parents: tuple[int, ...]  # index of each node's parent, -1 for the root; always smaller than the node's own index
    # the drafter's log-score per node (perturbed by the noise when sampling); empty if it has none
    scores: tuple[float, ...] = ()
    draw: Draw = Draw.FREE  # how children were drawn; siblings are in draw order
    # draft distribution that node i was drawn from, shape (nodes, vocab), float; only for draws that have one
    distributions: Tensor | None = None
    # names of the drafters that proposed node i, or of a drafter's own sources; empty if there is only one drafter with
    # one source
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
        """Return the nodes from the root's child down to `node`; empty for the root (-1)."""
        return path(self.parents, node)

    def token_paths(self) -> list[tuple[int, ...]]:
        """Return the tokens from the root's child to every node; entry 0 is the root's, entry 1 + i node i's."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return paths

    def children(self) -> list[list[int]]:
        """Return the children of every node in draw order; entry 0 is the root's, entry 1 + i is node i's."""
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
    """Return a tree without branches."""
    row = tuple(int(t) for t in tokens)
    return TokenTree(row, tuple(range(-1, len(row) - 1)), tuple(scores), draw, distributions)


def path(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root's child down to `node`, both ends included; empty for the root."""
    nodes: list[int] = []
    while node != ROOT:
        nodes.append(node)
        node = parents[node]
    nodes.reverse()
    return nodes


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every node; the root's children have depth 1."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent == ROOT else levels[parent] + 1)
    return levels


def is_path(parents: Sequence[int], nodes: Sequence[int]) -> bool:
    """Return whether `nodes` are nodes of the tree, each the child of the previous one, the first the root's."""
    return all(
        0 <= node < len(parents) and parents[node] == parent
        for node, parent in zip(nodes, (ROOT, *nodes), strict=False)
    )


def is_rooted(parents: Sequence[int], nodes: Sequence[int], root: int = ROOT) -> bool:
    """Whether these are nodes of the tree, in their order, each with its parent among them or equal to `root`."""
    kept = {root, *nodes}
    return all(
        before < node < len(parents) and parents[node] in kept
        for node, before in zip(nodes, (ROOT, *nodes), strict=False)
    )


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether every node's parent is the previous node."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """Return the attention mask: bool, shape (nodes, nodes); row = the node, column = itself or an ancestor."""
    count = len(parents)
    bits = ancestor_bits(parents, num_bytes=-(-count // 8))
    return np.unpackbits(bits, axis=1, count=count, bitorder="little").view(bool)


def ancestor_bits(parents: Sequence[int], *, num_bytes: int) -> np.ndarray:
    """Bits of each node itself and its ancestors: uint8 of shape (nodes, num_bytes), node 0 in the lowest bit."""
    rows = [0]  # the root's, which comes before node 0's
    for node, parent in enumerate(parents):
        rows.append(rows[1 + parent] | 1 << node)
    packed = b"".join([row.to_bytes(num_bytes, "little") for row in rows[1:]])
    return np.frombuffer(packed, dtype=np.uint8).reshape(len(parents), num_bytes)


def follow(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """Return the longest path from the root that is a prefix of `tokens`; the first drafted among equal paths."""
    frontier, reached = [ROOT], ROOT
    children = tree.children()
    for token in tokens:
        frontier = [child for node in frontier for child in children[node + 1] if tree.tokens[child] == token]
        if not frontier:
            break
        reached = frontier[0]
    return tree.path(reached)


def first_children(tree: TokenTree) -> dict[tuple[int, int], int]:
    """By parent and token the first child."""
    children: dict[tuple[int, int], int] = {}
    for node, key in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        children.setdefault(key, node)
    return children
