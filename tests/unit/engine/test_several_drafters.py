"""Several drafters in one engine: each sequence has the drafter and the planner that its request chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftree.core.tree import Draw, TokenTree, chain
from draftree.core.types import Budget, RoundRecord, Verdict
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.engine.memory import slot_budget
from draftree.engine.parts import EngineParts
from draftree.engine.prefix_cache import DraftStates
from draftree.engine.round import PassOutcome, observe, run_round
from draftree.engine.sequence import DraftChoice, DraftState, WritingSequence
from draftree.models.base import Extend, PassResult
from draftree.models.memory import Footprint
from draftree.models.table import TableLM, hashed
from draftree.planners import PLANNERS
from draftree.planners.base import Planner
from draftree.sampling.controls import build_controls
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams
from draftree.verifiers import VERIFIERS
from paced import FakeClock
from views import view_of

VOCAB = 8
CLOCK = FakeClock()
FEATURES = (-1, 2)


def view(draft: str) -> SequenceView:
    return view_of([1], vocab_size=4, draft=draft)


class Noting(Drafter[list[str]]):
    """Notes every call in its states; each draft takes a second per sequence."""

    def __init__(self) -> None:
        self.closed: list[list[str]] = []
        self.observed: list[Observation[list[str]]] = []
        self.reserved: list[tuple[int, int]] = []

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
        CLOCK.seconds += len(states)
        return [chain([budget.depth] * budget.depth) for budget in budgets]

    def observe(self, observations: Sequence[Observation[list[str]]]) -> None:
        self.observed.extend(observations)

    def close(self, state: list[str]) -> None:
        self.closed.append(state)


class Watching(Planner[str]):
    """Notes what it observes, and lets its drafter fill its depth."""

    class Config:
        """Takes no options."""

    others: tuple[tuple[int, int], ...] = ()

    def note_others(self, num_sequences: int, num_rows: int) -> None:
        self.others += ((num_sequences, num_rows),)

    def open(self, *, is_sampled: bool = False) -> str:
        return "state"

    def budgets(self, states: Sequence[str]) -> list[Budget]:
        return [Budget(self.default_depth, self.default_depth)] * len(states)

    def observe(self, states: Sequence[str], record: RoundRecord) -> None:
        self.seen = record

    def explain(self) -> str:
        return f"depth {self.default_depth}"


def choice(name: str, depth: int, planner: Planner[Any] | None = None, **traits: Any) -> DraftChoice:
    drawn = DraftTraits(draws=frozenset({Draw.FREE}), depth=depth, nodes=depth, **traits)
    return DraftChoice(name, Noting(), drawn, planner or Watching(None, default_depth=depth))


def parts_of(one: DraftChoice, other: DraftChoice) -> EngineParts:
    verifier = VERIFIERS.find("coupled")
    choices = {"one": one, "none": None, "other": other}
    return EngineParts(TableLM(hashed(VOCAB, seed=5)), verifier(verifier.Config()), choices, CLOCK)


def running(parts: EngineParts, *drafts: str) -> list[WritingSequence]:
    """Sequences in a round, each with the drafter of this name."""
    states, made = DraftStates(parts), []
    parts.target.reserve(len(drafts), 64)
    for place, draft in enumerate(drafts):
        controls = build_controls(SamplingParams(max_tokens=30), vocab_size=VOCAB, seed=place)
        sequence = WritingSequence(str(place), 0, [1], controls=controls, limit=31, detokenizer=None, draft=draft)
        sequence.slot, sequence.draft_state = parts.target.open(), states.open(sequence.view)
        sequence.plan_state = None if sequence.draft_state is None else sequence.draft_state.choice.planner.open()
        made.append(sequence)
    return made


def test_each_sequence_is_drafted_planned_and_timed_by_its_choice() -> None:
    one, other = choice("one", 2), choice("other", 3)
    other.planner.parts = other.planner.parts * 2
    parts = parts_of(one, other)
    (record,) = run_round(parts, running(parts, "one", "other", "none", ""))
    assert [row.drafted.tokens for row in record.sequences] == [(2, 2), (3, 3, 3), (), (2, 2)]
    assert record.part_seconds == pytest.approx((2.0, 1.0, 0.0), abs=0.01)
    seen, seen_by_other = one.planner.seen, other.planner.seen  # type: ignore[attr-defined]
    assert [row.request_id for row in seen.sequences] == ["0", "3"]
    assert [row.request_id for row in seen_by_other.sequences] == ["1"]
    assert (seen.draft_seconds, seen.part_seconds) == (pytest.approx(2.0, abs=0.01), ())
    assert (seen_by_other.draft_seconds, seen_by_other.part_seconds) == (
        record.part_seconds[1],
        record.part_seconds[1:],
    )
    for own in (seen, seen_by_other):
        assert own.total_seconds - own.draft_seconds == pytest.approx(record.total_seconds - record.draft_seconds)
    assert one.planner.others == ((2, 2), (2, 5)), "others' drafts are rows of the pass"  # type: ignore[attr-defined]
    assert other.planner.others == ((3, 3), (3, 7))  # type: ignore[attr-defined]


def test_a_drafter_without_sequences_takes_no_time() -> None:
    parts = parts_of(choice("one", 2), choice("other", 3))
    (record,) = run_round(parts, running(parts, "other", "none"))
    assert record.part_seconds == pytest.approx((0.0, 1.0), abs=0.01)


def test_only_planners_of_drafted_trees_trim() -> None:
    watch = PLANNERS.find("watch")
    parts = parts_of(choice("one", 2, watch(watch.Config(), default_depth=2)), choice("other", 3))
    (record,) = run_round(parts, running(parts, "one", "other", "none"))
    assert [len(row.tree) for row in record.sequences] == [0, 3, 0]


def test_each_drafter_observes_its_own_sequences_layers_and_picks() -> None:
    one, other = choice("one", 2, features=FEATURES, wants_picks=True), choice("other", 2, features=(0, 2))
    parts = parts_of(one, other)
    parts.target.num_layers = 4
    assert parts.capture == (0, 2, 4)
    jobs = [Extend(None, [0, 0], range(-1, 1)) for _ in range(3)]  # type: ignore[arg-type]
    hidden = torch.arange(36.0).view(6, 3, 2)
    gains = [
        PassOutcome(sequence, job, range(2), 1, chain([3]), Verdict((0,), 5))
        for job, sequence in enumerate(running(parts, "other", "none", "one"))
    ]
    observe(parts, gains, PassResult.of_jobs(jobs, TensorLogits(torch.zeros(6, VOCAB)), hidden))
    (seen,), (seen_by_other,) = one.drafter.observed, other.drafter.observed  # type: ignore[attr-defined]
    assert torch.equal(seen.hidden, hidden[4:][:, [2, 1]])
    assert torch.equal(seen_by_other.hidden, hidden[:2][:, [0, 1]])
    parts = parts_of(choice("one", 2, wants_picks=True), choice("other", 2))
    run_round(parts, running(parts, "one", "other"))
    one, other = parts.drafters
    assert one.drafter.observed[-1].verdict.picks  # type: ignore[attr-defined]
    assert other.drafter.observed[-1].verdict.picks == ()  # type: ignore[attr-defined]


def test_states_are_given_to_the_drafter_that_made_them_and_to_no_other() -> None:
    one, other = choice("one", 2), choice("other", 2)
    states = DraftStates(parts_of(one, other))
    kept = states.detach(states.open(view("one")), 5)
    assert kept == DraftState(one, ["open", "detach"])
    assert states.detach(states.open(view("none")), 5) is None
    assert states.fork(kept, view("one"), 5) == DraftState(one, ["open", "detach", "fork"])
    assert states.fork(kept, view("other"), 5) == DraftState(other, ["open"])
    assert states.fork(kept, view("none"), 5) is None
    closed = one.drafter.closed  # type: ignore[attr-defined]
    assert not closed, "a fork leaves the old state as it is"
    assert states.attach(kept, view(""), 5) == DraftState(one, ["open", "detach", "attach"])
    assert not closed
    assert states.attach(kept, view("other"), 5) == DraftState(other, ["open"])
    assert states.attach(kept, view("none"), 5) is None
    assert closed == [["open", "detach"]] * 2, "a state that no drafter takes over is closed by its own"


def test_memory_counts_every_drafter() -> None:
    one, other = choice("one", 2), choice("other", 3)
    parts = parts_of(one, other)
    DraftStates(parts).reserve(3, 100)
    assert one.drafter.reserved == other.drafter.reserved == [(3, 100)]  # type: ignore[attr-defined]
    assert slot_budget(parts).token_bytes == parts.target.footprint.token + 4
