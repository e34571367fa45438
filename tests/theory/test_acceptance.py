"""Acceptance of the rules matches the closed forms: exactly if outcomes are enumerated, else within an error."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.noise import Noise, gumbel
from draftree.core.tree import Draw, TokenTree
from draftree.lab.analysis.theory import (
    coupled_acceptance,
    expected_tokens,
    multistep_acceptance,
    recursive_acceptance,
    token_acceptance,
)
from draftree.models.table import hashed, listed, near
from oracle import ChancePicks, trees, written
from table_cases import Case, joint, rule

IID, WOR = Draw.IID, Draw.WITHOUT_REPLACEMENT


def pair(seed: int, *, vocab_size: int = 4, distance: float = 1.0, order: int = 16) -> Case:
    target = hashed(vocab_size, seed)
    return Case.of(target, near(target, seed + 1000, distance=distance), order=order)


def accepted(case: Case, name: str, shape: tuple[int, ...], draw: Draw = IID) -> float:
    return written(case, trees(case, shape, draw), rule(name).verify, length=len(shape) + 1).accepted


@pytest.mark.parametrize("seed", range(5))
def test_one_token_under_each_rule(seed: int) -> None:
    case = pair(seed)
    target, draft = case.target_distribution(()), case.draft_distribution(())
    for name in ("token", "block", "multistep", "recursive", "traversal"):
        assert accepted(case, name, (1,)) == pytest.approx(token_acceptance(target, draft), abs=1e-12)
    match = rule("match")
    matched = written(
        case,
        trees(case, (1,), IID),
        lambda tree, distributions, chance: match.verify(tree, ChancePicks(case, tree, chance), chance),
        length=2,
    )
    assert matched.accepted == pytest.approx(float((target * draft).sum()), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_children_of_one_node_under_recursive(seed: int) -> None:
    case = pair(seed, vocab_size=4, distance=2.0)
    target, draft = case.target_distribution(()), case.draft_distribution(())
    for children in (1, 2, 3):
        average = 0.0
        for drawn in itertools.permutations(range(4), children):
            gone = np.cumsum([0.0, *draft[list(drawn[:-1])]])
            chance = float(np.prod(draft[list(drawn)] / (1 - gone)))
            average += chance * recursive_acceptance(target, draft, drawn)
        assert average == pytest.approx(accepted(case, "recursive", (children,), WOR), abs=1e-12)


@pytest.mark.parametrize("children", [1, 2, 3])
def test_children_of_one_node_under_multistep(children: int) -> None:
    case = pair(2, vocab_size=3, distance=2.0)
    closed = multistep_acceptance(case.target_distribution(()), case.draft_distribution(()), children=children)
    assert accepted(case, "multistep", (children,)) == pytest.approx(closed, abs=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_tokens_per_round_of_a_memoryless_chain(length: int) -> None:
    case = pair(3, vocab_size=3, order=0)
    alpha = token_acceptance(case.target_distribution(()), case.draft_distribution(()))
    closed = (1 - alpha ** (length + 1)) / (1 - alpha)
    assert 1 + accepted(case, "token", (1,) * length) == pytest.approx(closed, abs=1e-12)
    assert expected_tokens(alpha, length) == pytest.approx(closed, abs=1e-12)


def heads(case: Case, length: int) -> list[tuple[int, ...]]:
    return [head for size in range(1, length + 1) for head in itertools.product(range(case.vocab_size), repeat=size)]


@pytest.mark.parametrize("seed", range(3))
def test_chain_under_token_is_a_sum_over_its_heads(seed: int) -> None:
    """A prefix is accepted with the product of min(T, D), each conditional on the tokens before."""
    case = pair(seed, vocab_size=3)
    total = 0.0
    for head in heads(case, 3):
        distributions = [
            (case.target_distribution(head[:i])[x], case.draft_distribution(head[:i])[x]) for i, x in enumerate(head)
        ]
        total += math.prod(min(t, d) for t, d in distributions)
    assert accepted(case, "token", (1, 1, 1)) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_chain_under_block_is_a_sum_over_its_heads(seed: int) -> None:
    """A drawn head is kept with its w: block and traversal accept it, or more, with just that probability."""
    case = pair(seed, vocab_size=3)
    total = 0.0
    for head in heads(case, 3):
        drawn = weight = 1.0
        for i, x in enumerate(head):
            t, d = case.target_distribution(head[:i])[x], case.draft_distribution(head[:i])[x]
            drawn *= d
            weight = min(1.0, weight * t / d)
        total += drawn * weight
    assert accepted(case, "block", (1, 1, 1)) == pytest.approx(total, abs=1e-12)
    assert accepted(case, "traversal", (1, 1, 1)) == pytest.approx(total, abs=1e-12)


# shared noise

distributions = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=12).filter(lambda w: sum(w) > 1e-3)


@given(distributions, st.data())
def test_coupled_is_between_match_and_token(weights: list[float], data: st.DataObject) -> None:
    """And above a / (2 - a), a = sum of min(T, D): what any coupling without communication can promise."""
    other = data.draw(st.lists(st.floats(0.0, 1.0), min_size=len(weights), max_size=len(weights)).filter(any))
    target, draft = np.array(weights) / np.sum(weights), np.array(other) / np.sum(other)
    best = token_acceptance(target, draft)
    coupled = coupled_acceptance(target, draft)
    assert coupled <= best + 1e-12
    assert coupled >= best / (2 - best) - 1e-12
    assert coupled >= float((target * draft).sum()) - 1e-12


@given(distributions, st.data())
def test_sorted_form_is_the_double_sum(weights: list[float], data: st.DataObject) -> None:
    other = data.draw(st.lists(st.floats(0.001, 1.0), min_size=len(weights), max_size=len(weights)))
    target = (np.array(weights) + 1e-3) / (np.sum(weights) + 1e-3 * len(weights))
    draft = np.array(other) / np.sum(other)
    double = sum(
        1 / sum(max(target[j] / target[i], draft[j] / draft[i]) for j in range(len(target))) for i in range(len(target))
    )
    assert coupled_acceptance(target, draft) == pytest.approx(double, abs=1e-12)


def test_coupled_at_its_edges() -> None:
    distribution = np.array([0.5, 0.25, 0.25, 0.0])
    assert coupled_acceptance(distribution, distribution) == pytest.approx(1.0)
    assert coupled_acceptance(distribution, np.array([0.0, 0.0, 0.0, 1.0])) == 0.0
    assert coupled_acceptance(np.array([0.0, 1.0]), np.array([0.5, 0.5])) == pytest.approx(0.5)


SEEDS = 20_000


def noise_rows(vocab_size: int, seeds: int = SEEDS) -> np.ndarray:
    """A request's own noise at one position, a seed a row."""
    return gumbel([Noise(seed).keys(7) for seed in range(seeds)], torch.arange(vocab_size)[None]).numpy()


@pytest.mark.parametrize("seed", range(3))
def test_agreement_under_shared_noise_is_the_closed_form(seed: int) -> None:
    """The real noise over 20000 seeds: four standard errors are at most 0.0142."""
    case = pair(seed, vocab_size=6)
    target, draft = case.target_distribution(()), case.draft_distribution(())
    noise = noise_rows(6)
    agreed = ((np.log(target) + noise).argmax(1) == (np.log(draft) + noise).argmax(1)).mean()
    closed = coupled_acceptance(target, draft)
    assert agreed == pytest.approx(closed, abs=4 * math.sqrt(closed * (1 - closed) / SEEDS))
    assert abs(closed - token_acceptance(target, draft)) > 0.01


def recursive_by_definition(target: np.ndarray, draft: np.ndarray, children: int) -> float:
    """Children without replacement, by their definition: what is rejected leaves both distributions."""
    if children == 0 or target.sum() == 0:
        return 0.0
    total = 0.0
    for token in np.flatnonzero(draft):
        kept = min(1.0, target[token] / draft[token])
        total += draft[token] * kept
        if kept < 1 and children > 1:
            rest = np.maximum(target - draft, 0)
            left = np.where(np.arange(len(draft)) == token, 0, draft)
            if left.sum() > 0:
                below = recursive_by_definition(rest / rest.sum(), left / left.sum(), children - 1)
                total += draft[token] * (1 - kept) * below
    return total


def test_recursive_by_definition_is_the_rule() -> None:
    case = pair(5, vocab_size=4)
    for children in (1, 2, 3):
        closed = recursive_by_definition(case.target_distribution(()), case.draft_distribution(()), children)
        assert accepted(case, "recursive", (children,), WOR) == pytest.approx(closed, abs=1e-12)


def test_one_node_of_eight_tokens_by_width() -> None:
    """Averages over 30 pairs of distributions: a coupled chain keeps less than `token`, a coupled tree more than all
    others.

    Standard error of the coupled numbers: 0.0012 at most, over 4000 noises. The others are exact.
    """
    noise = noise_rows(8, seeds=4_000)
    kept = {name: np.zeros(3) for name in ("coupled", "recursive", "multistep")}
    pairs = 30
    for seed in range(pairs):
        case = pair(seed, vocab_size=8, distance=0.5)
        target, draft = case.target_distribution(()), case.draft_distribution(())
        picks = (np.log(target) + noise).argmax(1)
        ranked = np.argsort(-(np.log(draft) + noise), axis=1)
        for width in (1, 2, 3):
            kept["coupled"][width - 1] += (ranked[:, :width] == picks[:, None]).any(1).mean() / pairs
            kept["recursive"][width - 1] += recursive_by_definition(target, draft, width) / pairs
            kept["multistep"][width - 1] += multistep_acceptance(target, draft, children=width) / pairs
    assert kept["coupled"].tolist() == pytest.approx([0.758, 0.930, 0.981], abs=0.005)
    assert kept["recursive"].tolist() == pytest.approx([0.7872, 0.8976, 0.9453], abs=1e-4)
    assert kept["multistep"].tolist() == pytest.approx([0.7872, 0.8601, 0.8943], abs=1e-4)


def test_a_drafter_that_is_the_target_is_always_kept() -> None:
    case = Case.of(listed({}, otherwise=[0.5, 0.3, 0.2]), listed({}, otherwise=[0.5, 0.3, 0.2]))
    for name, draw in (("token", IID), ("block", IID), ("multistep", IID), ("recursive", WOR), ("traversal", WOR)):
        assert accepted(case, name, (1, 1), draw) == pytest.approx(2.0, abs=1e-12)


def test_an_empty_tree_writes_one_token() -> None:
    case = pair(0)
    empty = written(case, [(TokenTree((), (), draw=IID), 1.0)], rule("token").verify, length=1)
    assert empty.accepted == 0
    assert empty.distribution == pytest.approx(joint(case, 1), abs=1e-15)
