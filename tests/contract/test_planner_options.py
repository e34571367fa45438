"""Every option of a planner changes some drafter's drafts, or is refused for that drafter: none is ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from drafter_rig import NAMES as DRAFTERS_BY_NAME
from drafter_rig import PREDICTION, SPECS, TABLE, VOCAB, read_unread
from draftree.build import Methods, build_parts, choose_methods
from draftree.core.errors import ConfigurationError
from draftree.core.noise import Noise
from draftree.core.tree import chain
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.drafters.base import LoadedDraftModel, Observation, SequenceView
from draftree.loading.loaded import LoadedModel
from draftree.models.table import TableLM, near
from draftree.planners import PLANNERS
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

COSTS = {1: 0.010, 2: 0.0105, 4: 0.011, 8: 0.013, 16: 0.018, 32: 0.028, 64: 0.05}
LIMITS = {
    ("fixed", "k"): "fixed:{}",
    ("additive", "start"): "additive,start={}",
    ("heuristic", "start"): "heuristic,start={}",
    ("threshold", "k"): "threshold:0,k={}",
    ("adaptive", "nodes"): "adaptive,nodes={}",
}
"""Options that limit a draft: how each is written. An option of a new planner belongs here, or in OTHERS."""
OTHERS = {("threshold", "confidence"), ("adaptive", "memory")}
MERGED = [
    "ngram,min=1+model:any",
    "ngram,min=1+lookahead",
    "suffix+prediction",
    "model:any,tree=1-2+synthetic",
    "suffix+grammar",
]
DRAFTS = [spec for name in DRAFTERS_BY_NAME for spec in SPECS.get(name, [name])] + MERGED
GIVE_CONFIDENCE = {"early-exit", "head", "layer-skip", "model", "ngram", "prediction", "quantized", "suffix"}
TEXT = [1, 2, 1, 2, 1, 4, 5, 6, 7, 4, 5, 8, 8, 8, 1, 2, 1, 5, 1, 2]


def options() -> set[tuple[str, str]]:
    found = set()
    for name in PLANNERS.names():
        found |= {(name, field.name) for field in dataclasses.fields(PLANNERS.find(name).Config)}
    return found


def load(name: str) -> LoadedDraftModel:
    return LoadedDraftModel(TableLM(near(TABLE, seed=2, distance=1.0)), None, name)


class FirstAllowed:
    """A guide of a grammar that always forces one token, so that drafters of grammars have something to draft."""

    def forced(self, history: History, way: Sequence[int], most: int) -> list[int]:
        return [(len(history) + place) % VOCAB for place in range(most)]


def drafted(methods: Methods) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Tokens and parents of the first tree, and the nodes that it may have."""
    features = methods.traits.features
    num_features = 1 + max(features, default=-1)
    target = TableLM(TABLE, partial=near(TABLE, seed=2, distance=1.0), num_features=num_features)
    parts = build_parts(methods, LoadedModel(target, None, (), "table"), None, load_draft=load)
    drafter, planner = parts.drafters[0].drafter, methods.planner
    if planner.wants_costs:
        planner.learn_costs(COSTS)
    params = SamplingParams(temperature=0, prediction=PREDICTION)
    controls = build_controls(params, vocab_size=VOCAB, seed=0)
    if methods.traits.reads_grammars:
        controls = dataclasses.replace(controls, guide=FirstAllowed(), noise=Noise(0))  # type: ignore[arg-type]
    drafter.reserve(1, 400)
    view = SequenceView(History(TEXT, capacity=400), controls, target.open())
    budgets = [budget.in_room(300) for budget in planner.budgets([planner.open()])]
    state, hidden = drafter.open(view), read_unread(target, view, features)
    if hidden is not None:
        drafter.observe([Observation(state, len(hidden), hidden=hidden)])
    (tree,) = drafter.draft([state], budgets)
    return tree.tokens, tree.parents, budgets[0].num_nodes


def limit_of(draft: str, option: str) -> int:
    planner = choose_methods(draft, "coupled", "fixed").planner
    return planner.default_nodes if option == "nodes" else planner.default_depth


def test_every_option_of_every_planner_is_tested_here() -> None:
    assert options() == set(LIMITS) | OTHERS


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("option", sorted(LIMITS))
def test_a_limit_shortens_the_draft_and_beyond_the_drafters_own_it_is_refused(
    draft: str, option: tuple[str, str]
) -> None:
    spec, most = LIMITS[option], limit_of(draft, option[1])
    whole = drafted(choose_methods(draft, "coupled", spec.format(most)))
    assert whole[0], "this drafter drafts nothing here, and so shows nothing"
    if most > 1:
        assert drafted(choose_methods(draft, "coupled", spec.format(1))) != whole
    with pytest.raises(ConfigurationError, match=f"{most} at most"):
        choose_methods(draft, "coupled", spec.format(most + 1))


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_confidence_shortens_the_draft_or_is_refused(draft: str) -> None:
    names = {part.partition(":")[0].partition(",")[0] for part in draft.split("+")}
    if names <= GIVE_CONFIDENCE:
        whole, short = (choose_methods(draft, "coupled", f"threshold:{least}") for least in (0, 1))
        if limit_of(draft, "k") > 1:
            assert drafted(short) != drafted(whole)
    else:
        with pytest.raises(ConfigurationError, match="has no probabilities"):
            choose_methods(draft, "coupled", "threshold:0.8")
        choose_methods(draft, "coupled", "threshold:0")


def test_a_longer_memory_trusts_a_drafter_longer() -> None:
    """All drafts are accepted at first, none after that: what was seen last counts the more the shorter the memory."""
    kept = []
    for memory in (1, 10_000):
        planner = choose_methods("suffix", "coupled", f"adaptive,memory={memory}").planner
        planner.learn_costs(COSTS)
        state, tree = planner.open(), chain([1, 2, 3], scores=[-0.1, -0.2, -0.3])
        for is_accepted in [True] * 60 + [False] * 6:
            planner.budgets([state])
            planner.trim([state], [tree], draft_seconds=1e-6)
            path = (0, 1, 2) if is_accepted else ()
            row = SequenceRecord("r", 30, 3, 3, len(path), 1 + len(path), len(path), tree=tree, drafted=tree, path=path)
            row = dataclasses.replace(row, bonus=7)
            planner.observe([state], RoundRecord(0, 1e-6, 0.01, 0, 0, 0.01, 4, (row,)))
        kept.append(planner._survivals_in(state, tree)[0])
    assert kept[0] < kept[1] - 0.1


def test_the_last_token_of_a_copied_chain_is_the_first_unsure_one() -> None:
    from draftree.drafters.ngram import confident, scores_of

    scores = scores_of(1, 6)
    chances = np.exp(np.diff([0.0, *scores]))
    assert list(chances) == sorted(chances), "the longer the match, the surer"
    assert len(confident(scores, float(chances[0]) + 1e-6)) == 1
    assert confident(scores, float(chances[0]) - 1e-6) == scores
    assert confident([-0.1, -1.5, -1.6], 0.5) == [-0.1, -1.5]
