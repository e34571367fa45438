"""Deliberate mistakes that silently bias the distribution, and the distance at which the oracle detects them.

The distances are those of the distributions below (three tokens, one node by default), computed by enumeration. Under
`match` the same drafts are harmless; `test_coupled.py` shows it for `coupled`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from biased_rules import bonus_from_the_target
from draftree.core.noise import Noise, gumbel
from draftree.core.tree import ROOT, Draw, TokenTree, chain
from draftree.core.types import Verdict
from draftree.models.table import hashed, listed, near
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import (
    RandomSource,
    acceptance,
    draft_distribution,
    normalised,
    residual,
    share_left,
    target_distribution,
    used_before,
)
from oracle import ChancePicks, Drafts, child_tuples, outcomes, trees, written
from oracle import with_children as add_children
from table_cases import Case, controls, joint, node_distributions, rule, variation

IID, WOR = Draw.IID, Draw.WITHOUT_REPLACEMENT
TARGET = [0.5, 0.35, 0.15]
DRAFT = [0.2, 0.25, 0.55]
CASE = Case.of(listed({(0,): TARGET}, otherwise=[0.2, 0.3, 0.5]), listed({(0,): DRAFT}, otherwise=[0.4, 0.4, 0.2]))
CAUGHT = 1e-3
"""Far above the oracle's error of 1e-12; every mutant exceeds it."""


def distance(drafts: Drafts, verify: Callable[..., Verdict], *, depth: int = 1, cases: Case = CASE) -> float:
    result = written(cases, drafts, verify, length=depth + 1)
    return variation(result.distribution, joint(cases, depth + 1))


def siblings(draw: Draw, tokens: tuple[int, ...]) -> TokenTree:
    empty = TokenTree((), (), draw=draw, distributions=torch.empty(0, 3))
    return add_children(CASE, empty, [ROOT], [tokens])


# drafts that are not what they claim to be


def top_two() -> Iterator[tuple[TokenTree, float]]:
    yield siblings(WOR, tuple(np.argsort(DRAFT)[::-1][:2].tolist())), 1.0


def top_one() -> Iterator[tuple[TokenTree, float]]:
    yield siblings(IID, (int(np.argmax(DRAFT)),)), 1.0


def likelier_of_two() -> Iterator[tuple[TokenTree, float]]:
    for tokens, probability in child_tuples(np.array(DRAFT), 2, IID):
        yield siblings(IID, (max(tokens, key=lambda token: DRAFT[token]),)), probability


def reordered() -> Iterator[tuple[TokenTree, float]]:
    for tokens, probability in child_tuples(np.array(DRAFT), 2, WOR):
        yield siblings(WOR, tuple(sorted(tokens, key=lambda token: -DRAFT[token]))), probability


def low_confidence_dropped() -> Iterator[tuple[TokenTree, float]]:
    for tree, probability in trees(CASE, (1,), IID):
        keep = DRAFT[tree.tokens[0]] >= 0.22
        yield (tree if keep else siblings(IID, ())), probability


def without_replacement_called_iid() -> Iterator[tuple[TokenTree, float]]:
    for tokens, probability in child_tuples(np.array(DRAFT), 2, WOR):
        yield siblings(IID, tokens), probability


def twins_removed() -> Iterator[tuple[TokenTree, float]]:
    for tokens, probability in child_tuples(np.array(DRAFT), 3, IID):
        yield siblings(IID, tuple(dict.fromkeys(tokens))), probability


FALSE_DRAFTS = [
    (top_one, "token", 0.1682),
    (top_one, "block", 0.1682),
    (top_two, "recursive", 0.1227),
    (top_two, "traversal", 0.1227),
    (likelier_of_two, "token", 0.0675),
    (reordered, "recursive", 0.0875),
    (reordered, "traversal", 0.0875),
    (low_confidence_dropped, "token", 0.1000),
    (low_confidence_dropped, "block", 0.1000),
    (without_replacement_called_iid, "multistep", 0.1222),
    (without_replacement_called_iid, "traversal", 0.1222),
    (twins_removed, "multistep", 0.0852),
]


@pytest.mark.parametrize(("drafts", "name", "expected"), FALSE_DRAFTS)
def test_false_drafts_are_caught(drafts: Callable[[], Drafts], name: str, expected: float) -> None:
    measured = distance(drafts(), rule(name).verify)
    assert measured > CAUGHT
    assert measured == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("drafts", list(dict.fromkeys(drafts for drafts, _, _ in FALSE_DRAFTS)))
def test_false_drafts_are_harmless_under_match(drafts: Callable[[], Drafts]) -> None:
    match = rule("match")

    def verify(tree: TokenTree, distributions: NodeDistributions, chance: RandomSource) -> Verdict:
        return match.verify(tree, ChancePicks(CASE, tree, chance), chance)

    assert distance(drafts(), verify) < 1e-12


# rules with a mistake in them


def block(
    tree: TokenTree, distributions: NodeDistributions, chance: RandomSource, *, forwards: bool, weighted: bool
) -> Verdict:
    """`block` with two mistakes to choose from: stop at the first failing head, or a residual without its weight."""
    length = len(tree)
    weights, rests = [1.0], []
    for node, token in enumerate(tree.tokens):
        target, draft = target_distribution(distributions, node), draft_distribution(tree, node, vocab_size=3)
        rests.append(residual(target, draft, weight=weights[-1] if weighted else 1.0))
        weights.append(acceptance(target, draft, token, weight=weights[-1]))
    coins = [share_left(rests[i], weights[i]) for i in range(1, length)] + [weights[length]]
    if forwards:
        kept = next((i for i in range(length) if not chance.accepts(coins[i])), length)
    else:
        kept = next((i + 1 for i in reversed(range(length)) if chance.accepts(coins[i])), 0)
    left = target_distribution(distributions, length) if kept == length else rests[kept]
    return Verdict(
        tuple(range(kept)), chance.draw(left if left.sum() > 0 else target_distribution(distributions, kept))
    )


def first_failure(tree: TokenTree, distributions: NodeDistributions, chance: RandomSource) -> Verdict:
    return block(tree, distributions, chance, forwards=True, weighted=True)


def unweighted_residual(tree: TokenTree, distributions: NodeDistributions, chance: RandomSource) -> Verdict:
    return block(tree, distributions, chance, forwards=False, weighted=False)


def test_the_twin_of_block_without_a_mistake_is_block() -> None:
    def right(tree: TokenTree, distributions: NodeDistributions, chance: RandomSource) -> Verdict:
        return block(tree, distributions, chance, forwards=False, weighted=True)

    assert distance(trees(CASE, (1, 1), IID), right, depth=2) < 1e-12


@pytest.mark.parametrize(
    ("mutant", "shape", "expected"),
    [
        (bonus_from_the_target, (1,), 0.1000),
        (first_failure, (1, 1), 0.1500),
        (unweighted_residual, (1, 1), 0.1168),
    ],
)
def test_mistaken_rules_are_caught(mutant: Callable[..., Verdict], shape: tuple[int, ...], expected: float) -> None:
    measured = distance(trees(CASE, shape, IID), mutant, depth=len(shape))
    assert measured > CAUGHT
    assert measured == pytest.approx(expected, abs=1e-4)


# noise that drafted and then verifies


class FixedUniform(RandomSource):
    """Coins all fall by one uniform: the drafter's own. Draws are left to another chance."""

    def __init__(self, uniform: float, other: RandomSource) -> None:
        self._uniform = uniform
        self._other = other

    def accepts(self, probability: float) -> bool:
        return self._uniform < probability

    def draw(self, weights: torch.Tensor) -> int:
        return self._other.draw(weights)


def test_a_uniform_that_drafted_and_then_accepts_is_caught() -> None:
    """The drafter inverts its cumulated distribution with a uniform, and the rule's coin falls by the same one.

    Between two breaks nothing changes, so the integral over the uniform is a finite sum.
    """
    verifier = rule("token")
    edges = np.cumsum(DRAFT)
    ratios = [min(1.0, t / d) for t, d in zip(TARGET, DRAFT, strict=True)]
    breaks = np.unique(np.concatenate([[0.0], edges[:-1], [r for r in ratios if r < 1], [1.0]]))
    distribution = np.zeros(3)
    for low, high in itertools.pairwise(breaks):
        uniform = (low + high) / 2
        tree = siblings(IID, (int(np.searchsorted(edges, uniform, side="right")),))
        distributions = node_distributions(CASE, tree)
        for verdict, probability in outcomes(
            lambda chance, u=uniform, t=tree, n=distributions: verifier.verify(t, n, FixedUniform(u, chance))
        ):
            first = tree.tokens[0] if verdict.path else verdict.bonus
            distribution[first] += (high - low) * probability
    assert variation(distribution, np.array(TARGET)) == pytest.approx(0.15, abs=1e-4)


def test_noise_that_drafted_and_then_draws_the_residual_is_caught() -> None:
    """`token` by hand over 40000 noises: a reject's draw by the Gumbel noise that drafted, and by another stream.

    As an exponential race: token 2 drafted (the only one that can be rejected) leaves the others behind by D_i * m, m
    standard exponential, so with R the residual distribution token 0 then wins with probability
    1 - R_1 / (1 + R_0 * (D_1/R_1 - D_0/R_0)), not R_0. The standard error of a frequency is 0.0025.
    """
    rounds = 40_000
    target, draft = np.array(TARGET), np.array(DRAFT)
    rest = np.maximum(target - draft, 0)
    reject = rest.sum()
    rest /= reject
    token_ids = torch.arange(3)
    drafted_with, other = (
        gumbel([Noise(seed).stream(name).keys(0) for seed in range(rounds)], token_ids[None]).numpy()
        for name in ("draft", "verify")
    )
    coins = np.random.default_rng(0).random(rounds)
    drafted = (np.log(draft) + drafted_with).argmax(axis=1)
    rejected = coins >= (target / draft)[drafted]
    assert set(drafted[rejected]) == {2}

    def distribution_with(noise: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            drawn = (np.log(rest) + noise).argmax(axis=1)
        return np.bincount(np.where(rejected, drawn, drafted), minlength=3) / rounds

    shared = 1 - rest[1] / (1 + rest[0] * (draft[1] / rest[1] - draft[0] / rest[0]))
    assert reject * (shared - rest[0]) == pytest.approx(0.0355, abs=1e-4)
    assert distribution_with(drafted_with)[0] - target[0] == pytest.approx(0.0355, abs=0.01)
    assert variation(distribution_with(other), target) < 0.01


# temperature 0 as a branch


class SoftmaxAtZero(NodeDistributions):
    """Distributions that forget the temperature: the full softmax, while the text should be greedy."""

    __slots__ = ("_inner",)

    def __init__(self, inner: NodeDistributions) -> None:
        self._inner = inner

    def probs(self, rows: Sequence[int] | slice = slice(None)) -> torch.Tensor:
        return torch.softmax(self._inner.logits[rows], dim=-1)


def test_the_full_softmax_as_the_distribution_at_temperature_zero_is_caught() -> None:
    verifier = rule("token")
    greedy = int(np.argmax(TARGET))
    tree = chain([int(np.argmax(DRAFT))], draw=IID, distributions=torch.tensor([DRAFT], dtype=torch.float64))
    right = node_distributions(CASE, tree, controls(3, temperature=0.0))

    def share_not_greedy(distributions: NodeDistributions) -> float:
        verdicts = outcomes(lambda chance: verifier.verify(tree, distributions, chance))
        return sum(p for verdict, p in verdicts if (tree.tokens[0] if verdict.path else verdict.bonus) != greedy)

    assert share_not_greedy(right) == 0
    assert share_not_greedy(SoftmaxAtZero(right)) == pytest.approx(0.4545, abs=1e-4)


# mistakes in tree rules that only a third level shows, which is why the enumeration has depth 3

DEEP = Case.of(hashed(3, seed=1), near(hashed(3, seed=1), seed=101, distance=2.0))


def traversal_twin(
    tree: TokenTree, distributions: NodeDistributions, chance: RandomSource, *, forgets_below: int
) -> Verdict:
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


def siblings_twin(
    tree: TokenTree, distributions: NodeDistributions, chance: RandomSource, *, forgets_below: int
) -> Verdict:
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
    assert distance(trees(DEEP, shape[:2], draw), mistaken, depth=2, cases=DEEP) < 1e-12
    assert distance(drafts, right, depth=3, cases=DEEP) < 1e-12
    measured = distance(drafts, mistaken, depth=3, cases=DEEP)
    assert measured > CAUGHT
    assert measured == pytest.approx(expected, abs=1e-4)
