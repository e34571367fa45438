"""Each lossless rule writes exactly the target's distribution: every draft, coin and draw is enumerated, not sampled.

The numbers of accepted tokens are exact too, and frozen: a change of them is a change of the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from draftree.core.tree import ROOT, Draw, TokenTree, chain
from draftree.models.table import hashed, listed, near
from oracle import ChancePicks, Drafts, Verify, child_tuples, grown, trees, with_children, written
from table_cases import Case, joint, rule, variation

IID, WOR, POINT = Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.POINT
TOLERANCE = 1e-12


@functools.cache
def case(vocab_size: int, distance: float) -> Case:
    """A target, and a drafter at a distance: 0.5 is a good draft, 2 a poor one."""
    target = hashed(vocab_size, seed=1)
    return Case.of(target, near(target, seed=101, distance=distance))


GOOD, POOR = 0.5, 2.0


def verify_with(name: str, cases: Case) -> Verify:
    """A rule's own code; `match` with picks that fall by chance."""
    verifier = rule(name)
    if name == "match":
        return lambda tree, distributions, chance: verifier.verify(tree, ChancePicks(cases, tree, chance), chance)
    return verifier.verify


def check(cases: Case, drafts: Drafts, name: str, *, depth: int) -> float:
    result = written(cases, drafts, verify_with(name, cases), length=depth + 1)
    assert variation(result.distribution, joint(cases, depth + 1)) < TOLERANCE
    return result.accepted


# rule, draw, shape, tokens, distance, accepted tokens on average
TABLE = [
    ("match", IID, (1, 1), 3, GOOD, 0.5264548859),
    ("token", IID, (1,), 3, GOOD, 0.8884148615),
    ("token", IID, (1, 1), 3, GOOD, 1.7296139097),
    ("token", IID, (1, 1, 1), 3, GOOD, 2.4481252536),
    ("block", IID, (1,), 3, GOOD, 0.8884148615),
    ("block", IID, (1, 1), 3, GOOD, 1.7389122899),
    ("block", IID, (1, 1, 1), 3, GOOD, 2.5034636196),
    ("multistep", IID, (1, 1), 3, GOOD, 1.7296139097),
    ("recursive", IID, (1, 1), 3, GOOD, 1.7296139097),
    ("traversal", IID, (1,), 3, GOOD, 0.8884148615),
    ("traversal", IID, (1, 1), 3, GOOD, 1.7389122899),
    ("traversal", IID, (1, 1, 1), 3, GOOD, 2.5034636196),
    ("match", IID, (2, 2), 3, GOOD, 0.9741846547),
    ("multistep", IID, (2, 2), 3, GOOD, 1.8788207467),
    ("traversal", IID, (2, 2), 3, GOOD, 1.8801416846),
    ("match", WOR, (2, 2), 3, GOOD, 1.2281537689),
    ("recursive", WOR, (2, 2), 3, GOOD, 1.9342265627),
    ("traversal", WOR, (2, 2), 3, GOOD, 1.9358687913),
    ("match", IID, (1, 1), 3, POOR, 0.4828520223),
    ("token", IID, (1,), 3, POOR, 0.5337423915),
    ("token", IID, (1, 1), 3, POOR, 0.9750672218),
    ("token", IID, (1, 1, 1), 3, POOR, 1.2468651651),
    ("block", IID, (1,), 3, POOR, 0.5337423915),
    ("block", IID, (1, 1), 3, POOR, 1.0268379576),
    ("block", IID, (1, 1, 1), 3, POOR, 1.3615053978),
    ("multistep", IID, (1, 1), 3, POOR, 0.9750672218),
    ("recursive", IID, (1, 1), 3, POOR, 0.9750672218),
    ("traversal", IID, (1,), 3, POOR, 0.5337423915),
    ("traversal", IID, (1, 1), 3, POOR, 1.0268379576),
    ("traversal", IID, (1, 1, 1), 3, POOR, 1.3615053978),
    ("match", WOR, (2, 2), 3, POOR, 1.2189216362),
    ("recursive", WOR, (2, 2), 3, POOR, 1.7663602241),
    ("traversal", WOR, (2, 2), 3, POOR, 1.7889241605),
    ("match", IID, (1, 2), 3, POOR, 0.5386223929),
    ("match", IID, (3,), 5, POOR, 0.3013109961),
    ("multistep", IID, (1, 2), 3, POOR, 1.0168957683),
    ("multistep", IID, (3,), 5, POOR, 0.4286600090),
    ("multistep", IID, (2, 1), 4, POOR, 1.1729574094),
    ("traversal", IID, (1, 2), 3, POOR, 1.0323135572),
    ("traversal", IID, (3,), 5, POOR, 0.4286600090),
    ("traversal", IID, (2, 1), 4, POOR, 1.1775963337),
    ("match", WOR, (1, 2), 4, POOR, 1.1167852280),
    ("match", WOR, (3,), 5, POOR, 0.7936617953),
    ("recursive", WOR, (1, 2), 4, POOR, 1.2396472051),
    ("recursive", WOR, (3,), 5, POOR, 0.8625347143),
    ("recursive", WOR, (2, 1), 4, POOR, 1.3899725737),
    ("recursive", WOR, (2, 1, 1), 3, POOR, 2.1550427055),
    ("traversal", WOR, (1, 2), 4, POOR, 1.2503153483),
    ("traversal", WOR, (3,), 5, POOR, 0.8625347143),
    ("traversal", WOR, (2, 1), 4, POOR, 1.4042991760),
    ("traversal", WOR, (2, 1, 1), 3, POOR, 2.3259726870),
    ("multistep", IID, (1, 1, 1), 3, GOOD, 2.4481252536),
    ("multistep", IID, (1, 1, 1), 3, POOR, 1.2468651651),
    ("multistep", IID, (1, 1, 1), 5, POOR, 0.4051630026),
    ("multistep", IID, (1, 1, 2), 3, POOR, 1.2766891011),
    ("multistep", IID, (1, 2, 1), 3, POOR, 1.3168467010),
    ("multistep", IID, (2, 1, 1), 3, POOR, 1.5287468582),
    ("multistep", IID, (2, 1, 1), 3, GOOD, 2.6360616412),
    ("multistep", IID, (1, 2, 2), 3, POOR, 1.3473477119),
    ("multistep", IID, (2, 2, 1), 2, POOR, 1.7475855718),
    ("recursive", IID, (1, 1, 1), 3, GOOD, 2.4481252536),
    ("recursive", IID, (1, 1, 1), 3, POOR, 1.2468651651),
    ("recursive", IID, (1, 1, 1), 5, POOR, 0.4051630026),
    ("recursive", IID, (2, 1), 4, POOR, 1.1729574094),
    ("recursive", IID, (1, 1, 2), 3, POOR, 1.2766891011),
    ("recursive", IID, (1, 2, 1), 3, POOR, 1.3168467010),
    ("recursive", IID, (2, 1, 1), 3, POOR, 1.5287468582),
    ("recursive", IID, (2, 1, 1), 3, GOOD, 2.6360616412),
    ("recursive", IID, (2, 2, 1), 2, POOR, 1.7475855718),
    ("recursive", WOR, (1, 1, 2), 3, POOR, 1.3659604769),
    ("recursive", WOR, (1, 2, 1), 3, POOR, 1.3364397337),
    ("recursive", WOR, (2, 1, 1), 3, GOOD, 2.6997328261),
    ("recursive", WOR, (1, 2, 2), 3, POOR, 1.4671530442),
    ("recursive", WOR, (2, 1, 2), 3, POOR, 2.3847970024),
    ("recursive", WOR, (2, 2, 2), 2, POOR, 3.0),
    ("traversal", IID, (1, 1, 1), 5, POOR, 0.4431794187),
    ("traversal", IID, (1, 1, 2), 3, POOR, 1.4103187598),
    ("traversal", IID, (1, 2, 1), 3, POOR, 1.3699748755),
    ("traversal", IID, (2, 1, 1), 3, POOR, 1.6483281306),
    ("traversal", IID, (2, 1, 1), 3, GOOD, 2.6931212288),
    ("traversal", IID, (1, 2, 2), 3, POOR, 1.4189707030),
    ("traversal", IID, (2, 2, 1), 2, POOR, 1.7691497022),
    ("traversal", WOR, (1, 1, 2), 3, POOR, 1.5049352062),
    ("traversal", WOR, (1, 2, 1), 3, POOR, 1.3788338338),
    ("traversal", WOR, (2, 1, 1), 3, GOOD, 2.7617056804),
    ("traversal", WOR, (1, 2, 2), 3, POOR, 1.5270417815),
    ("traversal", WOR, (2, 1, 2), 3, POOR, 2.5529874601),
    ("traversal", WOR, (2, 2, 2), 2, POOR, 3.0),
    ("token", IID, (1, 1), 5, POOR, 0.3241118519),
    ("block", IID, (1, 1), 5, POOR, 0.3352795604),
]


@pytest.mark.parametrize(("name", "draw", "shape", "vocab_size", "distance", "accepted"), TABLE)
def test_distribution_is_the_targets(
    name: str, draw: Draw, shape: tuple[int, ...], vocab_size: int, distance: float, accepted: float
) -> None:
    cases = case(vocab_size, distance)
    assert check(cases, trees(cases, shape, draw), name, depth=len(shape)) == pytest.approx(accepted, abs=1e-9)


def test_every_rule_of_trees_is_enumerated_to_depth_3_with_branches_at_every_level() -> None:
    deep = {(name, draw): set[int]() for name, draw, *_ in TABLE if name in ("multistep", "recursive", "traversal")}
    for name, draw, shape, *_ in TABLE:
        if len(shape) == 3 and (name, draw) in deep:
            deep[name, draw] |= {level for level, width in enumerate(shape) if width > 1}
    kinds = [("multistep", IID), ("recursive", IID), ("recursive", WOR), ("traversal", IID), ("traversal", WOR)]
    assert deep == {kind: {0, 1, 2} for kind in kinds}


def test_older_rules_never_keep_more() -> None:
    accepted = {(name, draw, shape, size, distance): count for name, draw, shape, size, distance, count in TABLE}
    older = {"match": ["token", "multistep", "recursive"], "token": ["block"], "multistep": ["traversal"]}
    older["recursive"] = ["traversal"]
    compared = 0
    for (name, *rest), count in accepted.items():
        for better in older.get(name, ()):
            if (better, *rest) in accepted:
                assert count <= accepted[(better, *rest)] + TOLERANCE
                compared += 1
    assert compared >= 20


RATIO_RULES = ["token", "block", "multistep", "recursive", "traversal"]


@pytest.mark.parametrize("name", RATIO_RULES)
def test_every_single_chain_of_point_draws_gives_the_distribution(name: str) -> None:
    cases = case(3, POOR)
    for tokens, _ in child_tuples(np.full(3, 1 / 3), 2, IID):
        check(cases, [(chain(tokens, draw=POINT), 1.0)], name, depth=2)


@pytest.mark.parametrize("name", ["multistep", "recursive", "traversal"])
def test_several_point_draws_under_one_node_give_the_distribution(name: str) -> None:
    cases = case(3, POOR)
    for tokens, _ in child_tuples(np.full(3, 1 / 3), 3, IID):
        tree = TokenTree(tokens, (ROOT, ROOT, 0), draw=POINT)
        check(cases, [(tree, 1.0)], name, depth=2)


# what filters leave: zeros of the target, of the draft, of both; distributions without a common token; certain
# distributions
HOLES = [
    ([0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
    ([0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.0, 0.5]),
    ([0.7, 0.0, 0.3, 0.0], [0.1, 0.4, 0.5, 0.0]),
    ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.4, 0.6]),
    ([0.0, 1.0, 0.0, 0.0], [0.2, 0.3, 0.4, 0.1]),
    ([0.2, 0.3, 0.4, 0.1], [0.0, 1.0, 0.0, 0.0]),
    ([0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]),
    ([0.2, 0.3, 0.4, 0.1], [0.2, 0.3, 0.4, 0.1]),
]


WITH_HOLES = [
    ("token", IID, (1, 1)),
    ("block", IID, (1, 1)),
    ("multistep", IID, (2,)),
    ("recursive", WOR, (2,)),
    ("traversal", IID, (2,)),
    ("traversal", WOR, (2,)),
    ("traversal", IID, (1, 2)),
]


@pytest.mark.parametrize("distributions", HOLES)
@pytest.mark.parametrize(("name", "draw", "shape"), WITH_HOLES)
def test_distributions_with_holes(
    name: str, draw: Draw, shape: tuple[int, ...], distributions: tuple[list[float], list[float]]
) -> None:
    target, draft = distributions
    if draw is WOR:  # a distribution of one token has no two children
        shape = (min(shape[0], int(np.count_nonzero(draft))),)
    cases = Case.of(listed({(0,): target}, otherwise=[0.4, 0.3, 0.2, 0.1]), listed({(0,): draft}, otherwise=target))
    check(cases, trees(cases, shape, draw), name, depth=len(shape))


def test_a_second_draw_too_rare_for_its_float32_distribution_is_still_lossless() -> None:
    """float32 gives nothing to what is left, though Gumbel noise names it: the draw then counts as certain."""
    cases = case(3, GOOD)
    distributions = torch.tensor([[1.0, 0.0, 0.0]] * 2)
    for name in ("recursive", "traversal"):
        tree = TokenTree((0, 2), (ROOT, ROOT), draw=WOR, distributions=distributions)
        # the first child is certain under its distribution, and the second certain because its distribution implies
        # nothing
        check(cases, [(tree, 1.0)], name, depth=1)


@pytest.mark.parametrize(
    ("name", "draw"), [("multistep", IID), ("recursive", WOR), ("traversal", IID), ("traversal", WOR)]
)
def test_best_first_growth_that_keeps_every_draw_in_order_is_lossless(name: str, draw: Draw) -> None:
    cases = case(3, POOR)
    distribution = cases.draft_distribution(())

    def width(tokens: tuple[int, ...], node: int) -> int:
        """Two children for the likelier of two siblings, none for the other."""
        return 2 if distribution[tokens[node]] >= distribution[tokens[1 - node]] else 0

    check(cases, grown(cases, draw, width), name, depth=2)


@pytest.mark.parametrize("name", RATIO_RULES)
def test_stopping_after_a_token_of_low_confidence_is_lossless(name: str) -> None:
    cases = case(3, POOR)

    def drafts() -> Iterator[tuple[TokenTree, float]]:
        for tree, probability in trees(cases, (1,), IID):
            if cases.draft_distribution(())[tree.tokens[0]] < 0.4:
                yield tree, probability
                continue
            for tokens, p_tokens in child_tuples(cases.draft_distribution(tree.tokens), 1, IID):
                yield with_children(cases, tree, [0], [tokens]), probability * p_tokens

    check(cases, drafts(), name, depth=2)


@pytest.mark.parametrize("name", ["match", *RATIO_RULES])
def test_an_empty_tree_is_plain_sampling(name: str) -> None:
    assert check(case(3, GOOD), [(TokenTree((), (), draw=IID), 1.0)], name, depth=0) == 0


def test_children_of_several_drafters_each_with_its_own_distribution() -> None:
    """First child from one distribution, second from another: multistep compares each with its own."""
    target = hashed(3, seed=1)
    one, two = (Case.of(target, near(target, seed, distance=1.5)) for seed in (7, 8))

    def drafts() -> Iterator[tuple[TokenTree, float]]:
        distributions = torch.from_numpy(np.stack([one.draft_distribution(()), two.draft_distribution(())]))
        for first in range(3):
            for second in range(3):
                tree = TokenTree((first, second), (ROOT, ROOT), draw=IID, distributions=distributions)
                yield tree, float(distributions[0, first] * distributions[1, second])

    for name in ("multistep", "traversal"):
        check(one, drafts(), name, depth=1)
