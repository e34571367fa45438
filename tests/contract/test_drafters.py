"""Contract tests of every file in the drafters' folder; a new drafter is tested automatically."""

from __future__ import annotations

import pytest
import torch

from drafter_rig import (
    BUDGETS,
    SELF_DRAFTING,
    TABLE,
    TEXTS,
    VOCAB,
    Rig,
    draws_of,
    every_case,
    same,
    specs,
)
from draftree.core.tree import Draw, TokenTree, depths, is_chain
from draftree.core.types import Budget
from draftree.drafters import DRAFTERS
from draftree.drafters.base import SequenceView
from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams


@pytest.mark.parametrize("spec", specs())
def test_a_configuration_declares_its_draft(spec: str) -> None:
    (parsed,) = DRAFTERS.parse(spec)
    cls, config = DRAFTERS.configure(parsed)
    traits = cls.describe(config)
    assert traits.draws
    assert 1 <= traits.depth <= traits.nodes
    assert traits.branches or traits.nodes == traits.depth


@every_case
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_keeps_to_its_budget_and_its_promises(spec: str, draw: Draw, temperature: float) -> None:
    (parsed,) = DRAFTERS.parse(spec)
    cls, config = DRAFTERS.configure(parsed)
    traits = cls.describe(config)
    rig = Rig(spec, draw).open(TEXTS * len(BUDGETS), temperature=temperature)
    budgets = [budget for budget in BUDGETS for _ in TEXTS]
    for budget, tree in zip(budgets, rig.draft(budgets), strict=True):
        assert len(tree) <= min(budget.num_nodes, traits.nodes)
        assert max(depths(tree.parents), default=0) <= min(budget.depth, traits.depth)
        assert all(0 <= token < VOCAB for token in tree.tokens)
        assert traits.branches or is_chain(tree.parents)
        if not len(tree):
            continue
        assert tree.draw is draw
        if draw is Draw.POINT:
            assert is_chain(tree.parents)
        if draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT):
            assert tree.distributions is not None
            assert tree.distributions.shape == (len(tree), VOCAB)
            assert torch.allclose(tree.distributions.sum(-1), torch.ones(len(tree), dtype=tree.distributions.dtype))
            # at temperature 0 only one token has a distribution; what is drawn after it counts as certain
            assert not temperature or all(tree.distributions[node, token] > 0 for node, token in enumerate(tree.tokens))
        if draw in (Draw.FREE, Draw.WITHOUT_REPLACEMENT):
            children = [[tree.tokens[child] for child in siblings] for siblings in tree.children()]
            assert all(len(set(tokens)) == len(tokens) for tokens in children), "twins waste rows"
    rig.close()


@every_case
def test_drafts_are_a_function_of_seed_and_text(spec: str, draw: Draw) -> None:
    one, other = (Rig(spec, draw).open(TEXTS) for _ in range(2))
    for num_kept in (0, 1, 3, 9, 0, 2):
        trees = one.draft([Budget(8, 4)] * len(TEXTS))
        assert all(same(a, b) for a, b in zip(trees, other.draft([Budget(8, 4)] * len(TEXTS)), strict=True))
        one.write(trees, num_kept)
        other.write(trees, num_kept)


@every_case
def test_other_sequences_in_the_batch_change_no_draft(spec: str, draw: Draw) -> None:
    budgets = [Budget(8, 4), Budget(1, 1), Budget(0, 0), Budget(5, 5), Budget(60, 2)]
    together = Rig(spec, draw).open(TEXTS)
    alone = [Rig(spec, draw).open(TEXTS) for _ in TEXTS]
    for num_kept in (1, 0, 4, 2):
        trees = together.draft(budgets)
        for index, rig in enumerate(alone):
            (tree,) = rig.drafter.draft([rig.states[index]], [budgets[index]])
            assert same(tree, trees[index])
            rig.write([tree if i == index else TokenTree((), ()) for i in range(len(TEXTS))], num_kept)
        together.write(trees, num_kept)


@every_case
def test_rounds_without_a_draft_leave_it_in_step(spec: str, draw: Draw) -> None:
    """The engine calls no drafter with an empty budget, but still reports the written tokens to it."""
    rig, asked = Rig(spec, draw).open(TEXTS), Rig(spec, draw).open(TEXTS)
    empty = [TokenTree((), ())] * len(TEXTS)
    for _ in range(3):
        rig.write(empty, 0)
        asked.draft([Budget(0, 0)] * len(TEXTS))
        asked.write(empty, 0)
    budgets = [Budget(6, 3)] * len(TEXTS)
    assert all(same(a, b) for a, b in zip(rig.draft(budgets), asked.draft(budgets), strict=True))


@every_case
def test_closing_frees_all_that_was_held(spec: str, draw: Draw) -> None:
    rig = Rig(spec, draw)
    for _ in range(2):
        rig.open(TEXTS)
        trees = rig.draft([Budget(8, 4)] * len(TEXTS))
        rig.write(trees, 2)
        rig.draft([Budget(8, 4)] * len(TEXTS))
        rig.close()
        rig.states.clear()
        rig.views.clear()
        assert all(not model._slots for model in (*rig.models, rig.target))


@every_case
def test_reserved_capacity_is_enough(spec: str, draw: Draw) -> None:
    rig = Rig(spec, draw)
    rig.drafter.reserve(1, 40)
    view = SequenceView(History([1, 2]), build_controls(SamplingParams(), vocab_size=VOCAB, seed=1), rig.target.open())
    rig.states, rig.views = [rig.drafter.open(view)], [view]
    while len(view.history) < 39:
        room = 39 - len(view.history)
        rig.write(rig.draft([Budget(60, room)]), 1)
    rig.close()


@pytest.mark.parametrize(
    "spec",
    [
        spec
        for spec in specs()
        if Draw.FREE in draws_of(spec) and (Rig(spec, Draw.FREE).models or spec.startswith(SELF_DRAFTING))
    ],
)
def test_a_drafter_without_shared_noise_does_not_follow_it(spec: str) -> None:
    """With the request's own noise a drafter similar to the target is right more often than with any other."""
    texts = [[a, b] for a in range(VOCAB) for b in range(VOCAB)]
    hits = []
    for shares_noise in (True, False):
        rig = Rig(spec, Draw.FREE, shares_noise=shares_noise).open(texts)
        trees = rig.draft([Budget(1, 1)] * len(texts))
        picks = [pick(view) for view in rig.views]
        hits.append(sum(tree.tokens[0] == token for tree, token in zip(trees, picks, strict=True)))
    assert hits[0] > hits[1] + 10


def pick(view: SequenceView) -> int:
    logits = TABLE(tuple(view.history.tokens.tolist()))[None]
    return Distributions(TensorLogits(logits), [DistributionRows(view.history, view.controls, [()])]).picks()[0]
