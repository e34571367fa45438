"""What every file in the drafters' folder owes the loop: a new drafter is tested the day it appears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftree.core.errors import ConfigurationError
from draftree.core.registry import Spec
from draftree.core.tree import Draw, TokenTree, depths, is_chain
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import DRAFTERS, DraftContext, Drafter, LoadedDraftModel, SequenceView
from draftree.models.table import TableLM, hashed, near
from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams
from method_files import described

VOCAB = 9
TABLE = hashed(VOCAB, seed=1, scale=2.0)
SPECS = {
    "early-exit": [
        "early-exit:1",
        "early-exit:3,k=2",
        "early-exit:2,tree=1-2-3",
        "early-exit:2,tree=best-9,k=4",
        "early-exit:2,tree=iid-2-2",
        "early-exit:2,tree=wor-3-1-1",
    ],
    "grammar": ["grammar", "grammar,k=3"],
    "layer-skip": [
        "layer-skip,attention=1-2,mlp=3",
        "layer-skip,mlp=0,k=2",
        "layer-skip,attention=5,tree=best-9,k=4",
        "layer-skip,attention=5,tree=iid-2-2",
        "layer-skip,attention=5,tree=wor-3-1-1",
    ],
    "lookahead": [
        "lookahead",
        "lookahead,window=0",
        "lookahead,window=0,random=4,n=3",
        "lookahead,window=0,candidates=1",
        "lookahead,window=5,n=2,candidates=1",
        "lookahead,window=4,n=3,candidates=2,random=5",
        "lookahead,window=12,n=5,candidates=6",
    ],
    "model": [
        "model:any",
        "model:any,k=2",
        "model:any,tree=1-2-3",
        "model:any,tree=best-9,k=4",
        "model:any,tree=iid-2-2",
        "model:any,tree=wor-3-1-1",
    ],
    "ngram": ["ngram", "ngram,min=1", "ngram,min=2,max=6,k=3"],
    "prediction": ["prediction", "prediction,width=1,k=5", "prediction,k=3,nodes=9,width=4,floor=0"],
    "suffix": ["suffix", "suffix,min=2,width=1,k=5", "suffix,k=3,nodes=9,width=4,floor=0", "suffix,memory=0"],
    "synthetic": ["synthetic", "synthetic,accept=0,k=3", "synthetic,accept=1", "synthetic,accept=0.5,k=5,width=3"],
}
"""Specs of each drafter that its name alone does not give: add those of a new one, its shapes and limits included."""
SELF_DRAFTING = ("early-exit", "layer-skip")
NAMES = DRAFTERS.names()
BUDGETS = [Budget(0, 0), Budget(0, 4), Budget(4, 0), Budget(1, 1), Budget(3, 2), Budget(2, 9), Budget(60, 60)]
PREDICTION = [5, 1, 5, 2, 2, 5, 8, 0, 5, 5, 1, 3, 7, 6]
"""What a drafter that reads predictions finds in every request; the others must not care."""
TEXTS = [[3], [1, 2, 1, 2, 1], [4, 5, 6, 7, 4, 5], [8] * 12, [0, 1, 2, 3, 4, 5, 6, 7, 8] * 3]


def specs() -> list[str]:
    return [spec for name in NAMES for spec in SPECS.get(name, [name])]


class Rig:
    """A drafter built as the front builds it, over tables."""

    def __init__(self, spec: str, draw: Draw, *, shares_noise: bool = True) -> None:
        (parsed,) = DRAFTERS.parse(spec)
        try:
            cls, config = DRAFTERS.configure(parsed)
        except ConfigurationError as error:
            pytest.fail(f"drafter '{spec}' cannot be built by this name alone: add specs of it to SPECS here ({error})")
        self.models: list[TableLM] = []
        self.target = TableLM(TABLE, partial=near(TABLE, seed=2, distance=1.0))
        context = DraftContext(self.target, None, draw, shares_noise, self._load)
        self.drafter: Drafter[Any] = cls(config, context)
        self.states: list[Any] = []
        self.views: list[SequenceView] = []

    def _load(self, name: str) -> LoadedDraftModel:
        self.models.append(TableLM(near(TABLE, seed=2, distance=1.0)))
        return LoadedDraftModel(self.models[-1], None, name)

    def open(self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0) -> Rig:
        params = SamplingParams(temperature=temperature, prediction=PREDICTION)
        self.drafter.reserve(len(texts), 200)
        for seed, text in enumerate(texts):
            controls = build_controls(params, vocab_size=VOCAB, seed=seed)
            self.views.append(SequenceView(History(text), controls, self.target.open()))
            self.states.append(self.drafter.open(self.views[-1]))
        return self

    def draft(self, budgets: Sequence[Budget]) -> list[TokenTree]:
        return self.drafter.draft(self.states, budgets)

    def write(self, trees: Sequence[TokenTree], num_kept: int) -> None:
        """The first way down is accepted, as far as asked; then a bonus."""
        verdicts = []
        for view, tree in zip(self.views, trees, strict=True):
            way = tree.path(len(tree) - 1)[:num_kept] if len(tree) else []
            view.history.append([*(tree.tokens[node] for node in way), 5])
            verdicts.append(Verdict(tuple(way), 5))
        self.drafter.observe(self.states, trees, verdicts)

    def close(self) -> None:
        for view, state in zip(self.views, self.states, strict=True):
            self.drafter.close(state)
            if view.slot is not None:
                self.target.close(view.slot)


def draws_of(spec: str) -> list[Draw]:
    (parsed,) = DRAFTERS.parse(spec)
    cls, config = DRAFTERS.configure(parsed)
    return sorted(cls.draws(config), key=lambda draw: draw.value)


CASES = [pytest.param(spec, draw, id=f"{spec}-{draw.value}") for spec in specs() for draw in draws_of(spec)]
every_case = pytest.mark.parametrize(("spec", "draw"), CASES)


def same(one: TokenTree, other: TokenTree) -> bool:
    distributions = (one.distributions is None) == (other.distributions is None)
    if one.distributions is not None and other.distributions is not None:
        distributions = torch.equal(one.distributions, other.distributions)
    return distributions and (one.tokens, one.parents, one.draw) == (other.tokens, other.parents, other.draw)


def test_the_folder_holds_the_drafters_that_are_promised() -> None:
    assert {"model", "ngram"} <= set(NAMES)
    assert set(SPECS) <= set(NAMES), "specs of a drafter that is not there any more"


@pytest.mark.parametrize("name", NAMES)
def test_file_describes_its_drafter(name: str) -> None:
    docstring = described(DRAFTERS.find(name))
    assert "Source:" in docstring
    assert "Cost" in docstring, "what it costs and when it loses belongs into the docstring"


@pytest.mark.parametrize("name", NAMES)
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="unknown option 'nonsense'"):
        DRAFTERS.configure(Spec(name, None, (("nonsense", "1"),)))


@pytest.mark.parametrize("spec", specs())
def test_a_configuration_says_what_it_will_draft(spec: str) -> None:
    (parsed,) = DRAFTERS.parse(spec)
    cls, config = DRAFTERS.configure(parsed)
    assert cls.draws(config)
    assert 1 <= cls.default_depth(config) <= cls.default_nodes(config)
    assert isinstance(cls.branches(config), bool)


@every_case
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: f"{b.num_nodes}-{b.depth}")
def test_a_tree_keeps_to_its_budget_and_its_promises(spec: str, draw: Draw, budget: Budget, temperature: float) -> None:
    rig = Rig(spec, draw).open(TEXTS, temperature=temperature)
    (parsed,) = DRAFTERS.parse(spec)
    cls, config = DRAFTERS.configure(parsed)
    for tree in rig.draft([budget] * len(TEXTS)):
        assert len(tree) <= min(budget.num_nodes, cls.default_nodes(config))
        assert max(depths(tree.parents), default=0) <= min(budget.depth, cls.default_depth(config))
        assert all(0 <= token < VOCAB for token in tree.tokens)
        assert cls.branches(config) or is_chain(tree.parents)
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
def test_company_in_the_batch_changes_no_draft(spec: str, draw: Draw) -> None:
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
    """The engine asks no drafter where a budget is empty, and tells it all the same what was written."""
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
def test_what_was_reserved_is_enough(spec: str, draw: Draw) -> None:
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
def test_a_drafter_that_must_not_know_the_noise_does_not_follow_it(spec: str) -> None:
    """With the request's own noise a drafter much like the target is right more often than with any other."""
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
