"""Places where the walk through a tree may end, and parts of trees that were drafted ahead."""

from __future__ import annotations

import math
from dataclasses import replace

from draftree.core.node_map import NodeMap, prune
from draftree.core.tree import EMPTY, TokenTree, depths, follow
from draftree.core.types import Budget


def likely_stops(tree: TokenTree, count: int, *, leaves_only: bool) -> list[int]:
    """Return the nodes at which the walk most probably ends, best first.

    The walk ends at a node if it reaches it and none of its children is the target's pick. The root is left out: a tree
    after it begins with the children that it has already.

    Args:
        tree: a drafted tree, with cumulative scores; without them all leaves are equal.
        count: maximum number of nodes.
        leaves_only: leave out nodes with children, for drafters that give one child, which is there already.
    """
    children = tree.children()
    reached = [min(1.0, math.exp(score)) for score in tree.scores] or [1.0] * len(tree)
    chances = {
        node: reached[node] - sum(reached[child] for child in children[node + 1])
        for node in range(len(tree))
        if not (leaves_only and children[node + 1])
    }
    return sorted(chances, key=lambda node: (-chances[node], node))[:count]


def below(tree: TokenTree, token: int) -> TokenTree:
    """Return what a tree has after one of its first tokens; empty if it has not this token."""
    way = follow(tree, [token])
    if not way:
        return EMPTY
    rest = NodeMap.below(tree.parents, way[0]).cut(tree)
    return replace(rest, scores=tuple(score - tree.scores[way[0]] for score in rest.scores))


def within(tree: TokenTree, budget: Budget) -> TokenTree:
    """Return the best nodes of a tree that a budget allows."""
    levels = depths(tree.parents)
    fitting = [node for node in range(len(tree)) if levels[node] <= budget.depth]
    if len(fitting) > budget.num_nodes and tree.scores:
        fitting.sort(key=lambda node: (-tree.scores[node], node))  # scores fall from parent to child
    kept = sorted(fitting[: budget.num_nodes])
    return tree if len(kept) == len(tree) else prune(tree, kept)
