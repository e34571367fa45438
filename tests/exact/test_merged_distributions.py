"""Merged draws keep the distribution, each child with the distribution that it was drawn from, and accept no less than
one part.

Every draft of every part is enumerated, merged by the code that serves real drafters, and verified in every way.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest

from draftree.core.node_map import first_levels, join
from draftree.core.tree import Draw, TokenTree, chain
from draftree.models.table import hashed, near
from oracle import Drafts, Written, child_tuples, trees, written
from table_cases import Case, joint, rule, variation

IID, POINT = Draw.IID, Draw.POINT
TOLERANCE = 1e-12
VOCAB = 3
RULES = ["multistep", "recursive", "traversal"]
TARGET = hashed(VOCAB, seed=1)
CASES = tuple(Case.of(TARGET, near(TARGET, seed, distance=distance)) for seed, distance in ((101, 2.0), (8, 1.0)))
CHAINS = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]


def check(case: Case, drafts: Drafts, name: str, *, depth: int) -> Written:
    result = written(case, drafts, rule(name).verify, length=depth + 1)
    assert variation(result.distribution, joint(case, depth + 1)) < TOLERANCE
    return result


@functools.cache
def alone(name: str, part: int, shape: tuple[int, ...]) -> float:
    return check(CASES[part], trees(CASES[part], shape, IID), name, depth=len(shape)).accepted


def with_chain(shape: tuple[int, ...], tokens: Sequence[int], *, budget: int = 99) -> Drafts:
    """A model's draws merged with a copied chain, which the spec names first."""
    copied = chain(tokens, draw=POINT)
    for tree, probability in trees(CASES[0], shape, IID):
        joined = join([copied, tree], ["ngram", "model"], vocab_size=VOCAB).tree
        yield first_levels(joined.parents, budget).cut(joined), probability


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1)])
def test_a_copied_chain_beside_draws_keeps_the_distribution_and_never_costs_acceptance(
    name: str, shape: tuple[int, ...]
) -> None:
    for tokens in CHAINS:
        found = check(CASES[0], with_chain(shape, tokens), name, depth=2).accepted
        assert found > alone(name, 0, shape) - TOLERANCE, f"chain {tokens}"


@pytest.mark.parametrize("name", RULES)
def test_a_right_chain_keeps_its_depth_where_the_draws_agree_with_it(name: str) -> None:
    """A drawn token that the chain copied as well goes on with the rest of the chain."""
    joined = join([chain([1, 2, 0], draw=POINT), next(drawn((1,)))], ["ngram", "model"], vocab_size=VOCAB).tree
    assert joined.tokens == (1, 2, 0)
    assert joined.parents == (-1, 0, 1)
    assert joined.sources == (("model", "ngram"), ("ngram",), ("ngram",))
    check(CASES[0], with_chain((1,), (1, 2)), name, depth=2)


def drawn(tokens: tuple[int, ...]) -> Iterator[TokenTree]:
    return (tree for tree, _ in trees(CASES[0], (1,) * len(tokens), IID) if tree.tokens == tokens)


def of_two(shapes: Sequence[tuple[int, ...]], *, budget: int = 99, copied: Sequence[int] | None = None) -> Drafts:
    """Draws of two models, and a copied chain between them."""
    sides = [list(trees(case, shape, IID)) for case, shape in zip(CASES, shapes, strict=True)]
    for (one, p_one), (other, p_other) in itertools.product(*sides):
        parts, names = [one, other], ["a", "b"]
        if copied is not None:
            parts, names = [one, chain(copied, draw=POINT), other], ["a", "ngram", "b"]
        joined = join(parts, names, vocab_size=VOCAB).tree
        yield first_levels(joined.parents, budget).cut(joined), p_one * p_other


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shapes", [((1,), (1,)), ((1, 1), (1, 1)), ((2,), (1, 1)), ((1, 1), (2,))])
def test_draws_of_two_models_keep_the_distribution_and_never_cost_acceptance(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    found = check(CASES[0], of_two(shapes), name, depth=2).accepted
    assert found > alone(name, 0, shapes[0]) - TOLERANCE


@pytest.mark.parametrize("name", RULES)
def test_three_parts_keep_the_distribution(name: str) -> None:
    for tokens in CHAINS:
        check(CASES[0], of_two([(1, 1), (1,)], copied=tokens), name, depth=2)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_a_budget_cuts_without_bias(name: str, budget: int) -> None:
    check(CASES[0], of_two([(2, 1), (1, 1)], budget=budget), name, depth=2)
    for tokens in CHAINS:
        check(CASES[0], with_chain((2, 1), tokens, budget=budget), name, depth=2)


def test_a_second_drawn_twin_stays_a_draw() -> None:
    """Dropping it would bias, because its presence depends on the draw."""

    def without_twins() -> Drafts:
        distributions = CASES[1].draft_distribution(())
        for tree, probability in trees(CASES[0], (1,), IID):
            for (token,), share in child_tuples(distributions, 1, IID):
                second, p_second = next((t, p) for t, p in trees(CASES[1], (1,), IID) if t.tokens == (token,))
                assert p_second == pytest.approx(share)
                parts = [tree] if tree.tokens == second.tokens else [tree, second]
                yield join(parts, ["a", "b"][: len(parts)], vocab_size=VOCAB).tree, probability * share

    result = written(CASES[0], without_twins(), rule("multistep").verify, length=2)
    assert variation(result.distribution, joint(CASES[0], 2)) > 1e-3
