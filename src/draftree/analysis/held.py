"""Recorded drafts, cut to a budget as their drafters would have cut them. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from draftree.core.node_map import NodeMap, first_levels
from draftree.core.tree import ROOT, TokenTree, depths
from draftree.core.types import Budget, DraftPart

__all__ = ["cut_to", "depth_of", "is_by"]


def cut_to(tree: TokenTree, budget: Budget, parts: Sequence[DraftPart]) -> TokenTree:
    """Limit a recorded tree to a budget, with the part of each merged drafter limited to its own.

    Args:
        tree: the recorded tree.
        budget: the budget.
        parts: the drafters of the trace.
    """
    limits = _limits(tree, budget, parts)
    kept: list[int] = []
    whole = set[int]()
    for node, level in enumerate(depths(tree.parents)):
        by = _parts_of(tree, node, parts)
        limit = max((limits[part] for part in by), default=0)
        if level <= limit and (tree.parents[node] == ROOT or tree.parents[node] in whole):
            kept.append(node)
            if _confidence(tree, node) >= budget.min_confidence and _survives(
                tree, node, budget, [parts[p] for p in by]
            ):
                whole.add(node)
    held = NodeMap.keeping(tree.parents, kept).cut(tree)
    held = first_levels(held.parents, budget.num_nodes).cut(held)
    return _without(held, [part.name for part, limit in zip(parts, limits, strict=True) if not limit])


def _limits(tree: TokenTree, budget: Budget, parts: Sequence[DraftPart]) -> list[int]:
    """Return the levels of each drafter; 0 for one whose condition is not met."""
    limits = [budget.of_part(part).depth for part in range(len(parts))]
    if not tree.sources:
        return limits
    earlier = [node for node in range(len(tree)) if any(not parts[p].runs_model for p in _parts_of(tree, node, parts))]
    others = NodeMap.keeping(tree.parents, earlier).cut(tree)
    for part, condition in enumerate(budget.conditions):
        if condition is not None and not condition.is_met([others]):
            limits[part] = 0
    return limits


def _parts_of(tree: TokenTree, node: int, parts: Sequence[DraftPart]) -> list[int]:
    if not tree.sources:
        return list(range(len(parts)))
    return [index for index, part in enumerate(parts) if is_by(tree.sources[node], part.name)]


def _without(tree: TokenTree, names: Sequence[str]) -> TokenTree:
    """Return the tree without the names of drafters that were skipped."""
    if not names or not tree.sources:
        return tree
    left = tuple([tuple(s for s in own if not any(is_by([s], name) for name in names)) for own in tree.sources])
    return replace(tree, sources=left)


def _survives(tree: TokenTree, node: int, budget: Budget, by: Sequence[DraftPart]) -> bool:
    """Return whether the drafters of a node would expand it, if the limit on survival applies to them."""
    is_calibrated = bool(tree.scores) and all(part.is_calibrated for part in by)
    return not is_calibrated or math.exp(tree.scores[node]) >= budget.min_survival


def _confidence(tree: TokenTree, node: int) -> float:
    """Return the drafter's own probability of a node given its parent; 1 if the tree has no scores."""
    if not tree.scores:
        return 1.0
    parent = tree.parents[node]
    return math.exp(tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent]))


def depth_of(tree: TokenTree, name: str) -> int:
    """Return the deepest level with a node of this drafter."""
    levels = zip(depths(tree.parents), tree.sources or [(name,)] * len(tree), strict=True)
    return max((level for level, names in levels if is_by(names, name)), default=0)


def is_by(names: Sequence[str], part: str) -> bool:
    """Return whether the sources of a node name this drafter."""
    return any(name == part or name.startswith(f"{part}/") for name in names)
