"""One of several drafters for each sequence: what it is given, what it observes, and whose states it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftree.core.tree import Draw, TokenTree, chain
from draftree.core.types import PLAIN, Budget, RoundRecord, Routed, SequenceRecord, Verdict
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.drafters.wrappers.several import RoutedDrafter
from draftree.models.memory import Footprint
from draftree.planners import PLANNERS
from draftree.planners.base import Planner, RoutedPlanner
from paced import FakeClock
from views import view_of

INDEX = {"": 0, "none": PLAIN, "one": 0, "other": 1}


def view(draft: str) -> SequenceView:
    return view_of([1], vocab_size=4, draft=draft)


class Noting(Drafter[list[str]]):
    """Notes every call in its states; each draft takes a second per sequence."""

    def __init__(self, traits: DraftTraits, clock: FakeClock) -> None:
        self.traits, self.clock = traits, clock
        self.closed: list[list[str]] = []
        self.observed: list[Observation[list[str]]] = []
        self.reserved: list[tuple[int, int]] = []

    @classmethod
    def describe(cls, config: Any) -> DraftTraits:
        return config

    def reserve(self, num_sequences: int, length: int) -> None:
        self.reserved.append((num_sequences, length))

    @property
    def footprint(self) -> Footprint:
        return Footprint(weights=1, token=2, logits=3, row=4)

    def open(self, sequence: SequenceView) -> list[str]:
        return ["open"]

    def fork(self, state: list[str], sequence: SequenceView, length: int) -> list[str]:
        return [*state, "fork"]

    def detach(self, state: list[str], length: int) -> list[str]:
        return [*state, "detach"]

    def attach(self, state: list[str], sequence: SequenceView, length: int) -> list[str]:
        return [*state, "attach"]

    def draft(self, states: Sequence[list[str]], budgets: Sequence[Budget]) -> list[TokenTree]:
        self.clock.seconds += len(states)
        return [chain([budget.num_nodes]) for budget in budgets]

    def observe(self, observations: Sequence[Observation[list[str]]]) -> None:
        self.observed.extend(observations)

    def close(self, state: list[str]) -> None:
        self.closed.append(state)

    @property
    def note(self) -> str:
        return "noted"


def traits(**given: Any) -> DraftTraits:
    return DraftTraits(draws=frozenset({Draw.FREE}), depth=2, nodes=3, **given)


def routed(one: DraftTraits, other: DraftTraits) -> tuple[RoutedDrafter, Noting, Noting]:
    clock = FakeClock()
    drafters = Noting(one, clock), Noting(other, clock)
    return (
        RoutedDrafter(drafters, INDEX, traits=[one, other], num_parts=[1, 2], clock=clock),
        *drafters,
    )


def test_each_sequence_is_drafted_by_its_choice_and_the_seconds_are_told_apart() -> None:
    drafter, *_ = routed(traits(), traits())
    states = [drafter.open(view(name)) for name in ("other", "none", "", "one")]
    trees = drafter.draft(states, [Budget(nodes, 1) for nodes in (4, 5, 6, 7)])
    assert [tree.tokens for tree in trees] == [(4,), (), (6,), (7,)]
    assert drafter.part_seconds == pytest.approx((2.0, 1.0, 0.0), abs=0.01)
    drafter.draft(states[:2], [Budget(1, 1)] * 2)
    assert drafter.part_seconds == pytest.approx((0.0, 1.0, 0.0), abs=0.01)


def test_the_loop_provides_what_any_drafter_needs_and_each_gets_its_own() -> None:
    first, second = traits(features=(-1, 2), wants_picks=True), traits(features=(0, 2), reads_predictions=True)
    whole = RoutedDrafter.describe([first, second])
    assert (whole.features, whole.wants_picks, whole.reads_predictions) == ((-1, 2, 0), True, True)
    drafter, one, other = routed(first, second)
    hidden = torch.arange(12.0).view(2, 3, 2)
    verdict = Verdict((0,), 5, picks=(1, 2))
    names = ("other", "none", "one")
    drafter.observe([Observation(drafter.open(view(name)), 1, chain([3]), verdict, hidden) for name in names])
    (seen,), (seen_by_other,) = one.observed, other.observed
    assert seen.verdict == verdict
    assert seen_by_other.verdict == Verdict((0,), 5)
    assert seen.hidden is not None
    assert seen_by_other.hidden is not None
    assert torch.equal(seen.hidden, hidden[:, [0, 1]])
    assert torch.equal(seen_by_other.hidden, hidden[:, [2, 1]])


def test_a_drafter_without_features_gets_none() -> None:
    drafter, one, other = routed(traits(features=(1,)), traits())
    hidden = torch.zeros(1, 1, 2)
    drafter.observe([Observation(drafter.open(view(name)), 1, hidden=hidden) for name in ("one", "other")])
    assert one.observed[0].hidden is hidden
    assert other.observed[0].hidden is None


def test_states_are_given_to_the_drafter_that_made_them_and_to_no_other() -> None:
    drafter, one, other = routed(traits(), traits())
    kept = drafter.detach(drafter.open(view("one")), 5)
    assert kept == Routed(0, ["open", "detach"])
    assert drafter.detach(drafter.open(view("none")), 5) is None
    assert drafter.fork(kept, view("one"), 5).own == ["open", "detach", "fork"]
    assert drafter.fork(kept, view("other"), 5) == Routed(1, ["open"])
    assert drafter.fork(kept, view("none"), 5) == Routed(PLAIN)
    assert not one.closed, "a fork leaves the old state as it is"
    assert drafter.attach(kept, view(""), 5).own == ["open", "detach", "attach"]
    assert not one.closed
    assert drafter.attach(kept, view("other"), 5) == Routed(1, ["open"])
    assert drafter.attach(kept, view("none"), 5) == Routed(PLAIN)
    assert one.closed == [kept.own] * 2, "a state that no drafter takes over is closed by its own"
    drafter.close(drafter.open(view("other")))
    drafter.close(drafter.open(view("none")))
    assert other.closed == [["open"]]


def test_memory_counts_every_drafter() -> None:
    drafter, one, other = routed(traits(), traits())
    drafter.reserve(3, 100)
    assert one.reserved == other.reserved == [(3, 100)]
    assert drafter.footprint == Footprint(weights=2, token=4, logits=6, row=8)
    assert drafter.note == "noted; noted"


class Watching(Planner[str]):
    """Notes what it observes."""

    class Config:
        """Takes no options."""

    def note_others(self, num_sequences: int, num_rows: int) -> None:
        self.others = num_sequences, num_rows

    def open(self) -> str:
        return "state"

    def budgets(self, states: Sequence[str]) -> list[Budget]:
        return [Budget(self.default_depth, self.default_depth)] * len(states)

    def observe(self, states: Sequence[str], record: RoundRecord) -> None:
        self.seen = record

    def explain(self) -> str:
        return f"depth {self.default_depth}"


def row(name: str, num_drafted: int = 0) -> SequenceRecord:
    return SequenceRecord(name, 4, num_drafted, 0, 0, 1, 0)


def test_each_planner_sees_its_own_sequences_and_its_drafters_seconds() -> None:
    one, other = Watching(None, default_depth=2), Watching(None, default_depth=3)
    other.parts = other.parts * 2
    planner = RoutedPlanner({"one": one, "other": other}, INDEX)
    assert planner.default_depth == 3
    states = [planner.open_for(name) for name in ("one", "other", "none", "")]
    assert [budget.depth for budget in planner.budgets(states)] == [2, 3, 0, 2]
    assert (one.others, other.others) == ((2, 2), (3, 3))
    rows = tuple(row(name, count) for name, count in zip("abcd", (2, 3, 0, 1), strict=True))
    record = RoundRecord(0.0, 6.0, 0.0, 0.0, 0.0, 9.0, 7, rows, part_seconds=(1.0, 2.0, 3.0))
    planner.observe(states, record)
    assert [r.request_id for r in one.seen.sequences] == ["a", "d"]
    assert (one.seen.draft_seconds, one.seen.part_seconds) == (1.0, ())
    assert [r.request_id for r in other.seen.sequences] == ["b"]
    assert (other.seen.draft_seconds, other.seen.part_seconds) == (5.0, (2.0, 3.0))
    assert (one.others, other.others) == ((2, 5), (3, 6)), "others' drafts are rows of the pass"
    assert one.seen.total_seconds - one.seen.draft_seconds == record.total_seconds - record.draft_seconds
    assert [planner.explain_of(state) for state in states] == ["depth 2", "depth 3", "", "depth 2"]
    assert planner.explain() == "one: depth 2; other: depth 3"


def test_only_planners_of_drafted_trees_trim() -> None:
    watch = PLANNERS.find("watch")
    planner = RoutedPlanner(
        {"one": watch(watch.Config(), default_depth=2), "other": Watching(None, default_depth=2)}, INDEX
    )
    states = [planner.open_for(name) for name in ("one", "other", "none", "one")]
    trees = [chain([1, 2]), chain([3]), chain([]), chain([])]
    assert planner.trim(states, trees, draft_seconds=0.0) == [(), None, None, ()]
    assert planner.trim(states, [chain([]), *trees[1:]], draft_seconds=0.0) == [None] * 4
