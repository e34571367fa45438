"""Trees as drafters grow them are the draws that they claim to be: under rules that rely on it the distribution is the
target's.

2000 texts of three tokens over 3 tokens for each pairing, a seed each, Pearson's test over the 27 texts at level 1e-4,
26 degrees of freedom: a chi-square distance of 0.04 (a total variation of about 0.1) is found with probability 0.99.
The smaller errors are those of the rules, which `exact` and `test_rules` look for; this looks for a drafter whose
children are no draws. The biased variant is one.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from draftree.build import build_parts, choose_methods
from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import LoadedDraftModel, SequenceView
from draftree.drafters.tree_builder.builder import TreeBuilder, parse_shape
from draftree.drafters.tree_builder.model_stepper import ModelStepper
from draftree.loading.loaded import LoadedModel
from draftree.models.table import hashed, near
from draftree.sampling.history import History
from draftree.verifiers.base import NoiseSource
from sampled_trees import chi_square
from table_cases import Case, controls, distribution_of, joint, node_distributions, rule

LEVEL = 1e-4
ROUNDS = 2_000
TARGET = hashed(3, seed=21)
CASE = Case.of(TARGET, near(TARGET, seed=22, distance=1.5))


def grown(shape: str, draw: Draw) -> list[TokenTree]:
    """A tree for every seed, all in one batch, as the engine requests them."""
    form = parse_shape(shape, None)
    growth = TreeBuilder(ModelStepper(CASE.drafter), shape=form, draw=draw, shares_noise=False)
    views = [SequenceView(History(CASE.prompt), controls(3, seed=seed)) for seed in range(ROUNDS)]
    states = [growth.stepper.open(view) for view in views]
    trees = growth.grow(states, [Budget(form.num_nodes, form.depth)] * ROUNDS)
    for state in states:
        growth.stepper.close(state)
    return trees


def p_value(name: str, trees: list[TokenTree]) -> float:
    verifier = rule(name)
    counts = np.zeros((3, 3, 3))
    for seed, tree in enumerate(trees):
        chosen = controls(3, seed=seed)
        chance = NoiseSource(chosen.noise.stream("verify", len(CASE.prompt)))
        verdict = verifier.verify(tree, node_distributions(CASE, tree, chosen), chance)
        text = [*(tree.tokens[node] for node in verdict.path), verdict.bonus]
        rest = NoiseSource(chosen.noise.stream("rest"))
        while len(text) < 3:
            text.append(rest.draw(distribution_of(CASE.target, (*CASE.prompt, *text))))
        counts[tuple(text[:3])] += 1
    return chi_square(counts.reshape(1, -1), joint(CASE, 3).reshape(1, -1))[1]


@pytest.mark.parametrize(
    ("name", "shape", "draw"),
    [
        ("token", "iid-1-1", Draw.IID),
        ("multistep", "iid-2-2", Draw.IID),
        ("recursive", "wor-2-2", Draw.WITHOUT_REPLACEMENT),
    ],
)
def test_grown_trees_are_draws(name: str, shape: str, draw: Draw) -> None:
    assert p_value(name, grown(shape, draw)) > LEVEL


def sorted_by_distribution(tree: TokenTree) -> TokenTree:
    """The same two children at the root, the likelier first: no longer in draw order."""
    assert tree.distributions is not None
    tokens = sorted(tree.tokens, key=lambda token: -tree.distributions[0, token].item())  # type: ignore[index]
    return dataclasses.replace(tree, tokens=tuple(tokens))


def test_a_biased_variant_is_detected() -> None:
    trees = grown("wor-2", Draw.WITHOUT_REPLACEMENT)
    assert p_value("recursive", [sorted_by_distribution(tree) for tree in trees]) < LEVEL


def merged(draft: str, verify: str) -> list[TokenTree]:
    """A merged tree for every seed, by drafters that are built as the front builds them."""
    methods = choose_methods(draft, verify, "fixed")
    target = LoadedModel(CASE.target, None, (), "table")

    def load(name: str) -> LoadedDraftModel:
        return LoadedDraftModel(CASE.drafter, None, name)

    parts = build_parts(methods, target, None, load_draft=load)
    drafter = parts.drafters[0].drafter
    views = [SequenceView(History(CASE.prompt), controls(3, seed=seed)) for seed in range(ROUNDS)]
    states = [drafter.open(view) for view in views]
    return drafter.draft(states, [Budget(8, 2)] * ROUNDS)


@pytest.mark.parametrize("verify", ["multistep", "traversal"])
def test_draws_of_merged_drafters_are_independent_of_one_another(verify: str) -> None:
    """Both drafters are the same model here: by the same noise the second would draw what the first did."""
    trees = merged("model:a,k=2+model:b,k=2", verify)
    first = [tuple(tree.tokens[node] for node in tree.children()[0]) for tree in trees]
    distribution = CASE.draft_distribution(())
    agreeing = np.mean([one == other for one, other in first])
    assert abs(agreeing - float((distribution**2).sum())) < 0.05
    assert p_value(verify, trees) > LEVEL
