"""A copying drafter merged with a sampling model: under ratio rules it adds acceptance, in any order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from draftree import SamplingParams
from draftree.build import build_parts, choose_methods
from draftree.core.tree import Draw, TokenTree, chain
from draftree.core.types import Budget, DraftCondition
from draftree.drafters.base import Drafter, DraftTraits, LoadedDraftModel, SequenceView
from draftree.drafters.wrappers.merged import MergedDrafter
from draftree.engine.engine import Engine
from draftree.engine.requests import SequenceFactory
from draftree.loading.loaded import LoadedModel
from draftree.models.table import TableLM, hashed, near
from draftree.options import EngineLimits
from draftree.outputs import CompletionStats, completion_of
from paced import FakeClock

TABLE = hashed(16, seed=1, scale=3.0)
SMALL = near(TABLE, seed=2, distance=1.0)


@functools.cache
def written(draft: str, verify: str) -> tuple[CompletionStats, ...]:
    """Eight texts of 40 tokens, at temperature 1."""
    target = TableLM(TABLE, order=2)
    parts = build_parts(
        choose_methods(draft, verify, "fixed"),
        LoadedModel(target, None, (), "table"),
        None,
        load_draft=lambda name: LoadedDraftModel(TableLM(SMALL, order=2), None, name),
    )
    engine = Engine(parts, EngineLimits(max_batch_size=8))
    requests = SequenceFactory(parts, None, eos_ids=(), slot_room=lambda: engine.slot_room)
    sequences = [
        sequence
        for seed in range(8)
        for sequence in requests.sequences([1, 2, seed], SamplingParams(max_tokens=40, temperature=1.0, seed=seed))
    ]
    engine.add(*sequences)
    while not engine.is_idle:
        engine.step()
    return tuple(completion_of(sequence, prompt_index=0).stats for sequence in sequences)


def accepted_per_round(draft: str, verify: str) -> float:
    done = written(draft, verify)
    return sum(one.accepted_tokens for one in done) / sum(one.rounds for one in done)


@pytest.mark.parametrize("verify", ["multistep", "recursive", "traversal"])
def test_the_order_of_the_spec_does_not_cost_acceptance(verify: str) -> None:
    alone = accepted_per_round("model:x,k=3", verify)
    merged = accepted_per_round("ngram,min=1+model:x,k=3", verify)
    assert merged == accepted_per_round("model:x,k=3+ngram,min=1", verify)
    assert merged >= alone


def test_statistics_name_both_drafters() -> None:
    totals: dict[str, int] = {}
    for one in written("ngram,min=1+model:x,k=3", "multistep"):
        for source, count in one.accepted_by_source.items():
            totals[source] = totals.get(source, 0) + count
    assert set(totals) == {"ngram,min=1", "model:x,k=3"}


class Fixed(Drafter[None]):
    """Drafts the same tree; notes how often."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree, self.calls = tree, 0

    @classmethod
    def describe(cls, config: object) -> DraftTraits:
        raise NotImplementedError

    def open(self, sequence: SequenceView) -> None:
        return None

    def draft(self, states: Sequence[None], budgets: Sequence[Budget]) -> list[TokenTree]:
        self.calls += len(states)
        return [self.tree for _ in states]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_drafter_with_a_model_is_skipped_where_a_lookup_has_all_that_it_would_add(*, is_first: bool) -> None:
    model, lookup = Fixed(chain([1, 2], scores=[-0.1, -0.2])), Fixed(chain([1, 2, 3], scores=[-0.1, -0.2, -0.3]))
    traits = [
        DraftTraits(draws=frozenset({Draw.FREE}), depth=4, nodes=4, runs_model=runs_model)
        for runs_model in (is_first, not is_first)
    ]
    drafters, names = ([model, lookup], ["m", "l"]) if is_first else ([lookup, model], ["l", "m"])
    merged = MergedDrafter(drafters, names, traits=traits, draw=Draw.FREE, vocab_size=9, clock=FakeClock())
    states = [merged.open(None) for _ in range(2)]  # type: ignore[arg-type]
    needs = [DraftCondition((0.7, 0.5), least) for least in (0.3, 0.1)]
    budgets = [
        Budget(8, 4, part_depths=(4, 4), conditions=(need, None) if is_first else (None, need)) for need in needs
    ]
    skipped, drafted = merged.draft(states, budgets)
    assert (model.calls, lookup.calls) == (1, 2)
    assert set(skipped.sources) == {("l",)}
    assert {name for names in drafted.sources for name in names} == {"l", "m"}
    assert len(merged.part_seconds) == 2
    assert min(merged.part_seconds) > 0


class Slots(Drafter[object]):
    """Keeps what it opened until it is closed."""

    def __init__(self) -> None:
        self.states: list[object] = []

    @classmethod
    def describe(cls, config: object) -> DraftTraits:
        raise NotImplementedError

    def open(self, sequence: SequenceView) -> object:
        self.states.append(object())
        return self.states[-1]

    def detach(self, state: object, length: int) -> object:
        return state

    def attach(self, state: object, sequence: SequenceView, length: int) -> object:
        return state

    def close(self, state: object) -> None:
        self.states.remove(state)


def test_a_released_drafter_closes_what_is_open_once() -> None:
    """The error of a failed request keeps closed sequences alive."""
    drafters = [Slots(), Slots()]
    traits = [DraftTraits(draws=frozenset({Draw.FREE}), depth=4, nodes=4)] * 2
    merged = MergedDrafter(drafters, ["a", "b"], traits=traits, draw=Draw.FREE, vocab_size=9)
    view: Any = None
    closed, finished, resumed, _written = (merged.open(view) for _ in range(4))
    merged.close(closed)
    kept = merged.detach(finished, 1)
    cached = merged.detach(resumed, 1)
    assert cached is not None
    again = merged.attach(cached, view, 1)
    merged.release(0)
    assert [len(drafter.states) for drafter in drafters] == [0, 3]
    assert kept is not None
    merged.close(merged.fork(kept, view, 1))
    merged.close(again)
    assert len(drafters[1].states) == 2
