"""Mistakes in tree rules that only a third level shows, which is why the enumeration has depth 3."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.models.table import hashed, near
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.common.chance import Chance
from draftree.verifiers.common.ratios import (
    acceptance,
    draft_distribution,
    normalised,
    residual,
    share_left,
    target_distribution,
    used_before,
)
from oracle import Drafts, trees, written
from table_cases import Case, joint, variation

IID, WOR = Draw.IID, Draw.WITHOUT_REPLACEMENT
CAUGHT = 1e-3
DEEP = Case.of(hashed(3, seed=1), near(hashed(3, seed=1), seed=101, distance=2.0))


def distance_of(drafts: Drafts, verify: Callable[..., Verdict], *, depth: int) -> float:
    return variation(written(DEEP, drafts, verify, length=depth + 1).distribution, joint(DEEP, depth + 1))


def traversal_twin(tree: TokenTree, distributions: NodeDistributions, chance: Chance, *, forgets_below: int) -> Verdict:
    """`traversal` again; from nodes at this depth on children are entered as if the way to them were certain."""
    children = tree.children()

    def visit(node: int, weight: float) -> Verdict | None:
        target = target_distribution(distributions, node + 1)
        siblings = children[node + 1]
        for index, child in enumerate(siblings):
            draft = draft_distribution(tree, child, vocab_size=3, used=used_before(tree, siblings, index))
            entered = weight if len(tree.path(node)) < forgets_below else 1.0
            kept = visit(child, acceptance(target, draft, tree.tokens[child], weight=entered))
            if kept is not None:
                return kept
            rest = residual(target, draft, weight=weight)
            weight = share_left(rest, weight)
            target = normalised(rest, otherwise=target)
        if node == ROOT or chance.accepts(weight):
            return Verdict(tuple(tree.path(node)), chance.draw(target))
        return None

    verdict = visit(ROOT, 1.0)
    assert verdict is not None
    return verdict


def siblings_twin(tree: TokenTree, distributions: NodeDistributions, chance: Chance, *, forgets_below: int) -> Verdict:
    """`multistep` and `recursive` again; from nodes at this depth on a reject takes nothing off the target."""
    children = tree.children()
    node, depth = ROOT, 0
    while True:
        target, siblings = target_distribution(distributions, node + 1), children[node + 1]
        for index, child in enumerate(siblings):
            draft = draft_distribution(tree, child, vocab_size=3, used=used_before(tree, siblings, index))
            if chance.accepts(acceptance(target, draft, tree.tokens[child])):
                node, depth = child, depth + 1
                break
            if depth < forgets_below:
                target = normalised(residual(target, draft), otherwise=target)
        else:
            return Verdict(tuple(tree.path(node)), chance.draw(target))


@pytest.mark.parametrize(
    ("twin", "draw", "shape", "expected"),
    [
        (traversal_twin, IID, (1, 1, 1), 0.2769),
        (traversal_twin, IID, (2, 1, 1), 0.3783),
        (traversal_twin, WOR, (1, 2, 1), 0.4110),
        (siblings_twin, IID, (1, 1, 2), 0.0844),
        (siblings_twin, WOR, (2, 1, 2), 0.0653),
    ],
)
def test_a_mistake_at_the_third_level_is_caught_there_and_nowhere_else(
    twin: Callable[..., Verdict], draw: Draw, shape: tuple[int, ...], expected: float
) -> None:
    mistaken = functools.partial(twin, forgets_below=2)
    right = functools.partial(twin, forgets_below=3)
    drafts = list(trees(DEEP, shape, draw))
    assert distance_of(trees(DEEP, shape[:2], draw), mistaken, depth=2) < 1e-12
    assert distance_of(drafts, right, depth=3) < 1e-12
    measured = distance_of(drafts, mistaken, depth=3)
    assert measured > CAUGHT
    assert measured == pytest.approx(expected, abs=1e-4)
