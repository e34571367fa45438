"""Drafting ahead: the drafter works while the target does; hits, misses and a lost process change no text."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams, build
from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import Drafter
from draftree.drafters.tree_builder.builder import TreeBuildingDrafter
from draftree.drafters.wrappers import ahead as ahead_module
from draftree.drafters.wrappers.ahead import AheadDrafter, Overlap, below, likely_stops, measure_overlap, within
from draftree.models.base import Commit, Extend, Fork, Pass, PassResult
from draftree.models.process import ProcessEndedError, ProcessModel, serve_model
from draftree.models.table import TableLM
from piped_drafts import NEAR, TABLE, VOCAB, piped_drafts

pipes = pytest.fixture(piped_drafts)
SECONDS = 300
"""Time after which a meeting of two threads has failed."""
TREE = TokenTree((1, 2, 3, 4), (-1, -1, 0, 0), scores=tuple(map(math.log, (0.6, 0.3, 0.5, 0.02))))


def test_stops_are_ranked_by_the_probability_that_the_walk_ends_there() -> None:
    assert likely_stops(TREE, 9, leaves_only=False) == [2, 1, 0, 3]
    assert likely_stops(TREE, 2, leaves_only=True) == [2, 1]
    assert likely_stops(EMPTY, 3, leaves_only=False) == []


def test_what_is_below_a_guess_has_its_own_scores() -> None:
    rest = below(TREE, 1)
    assert (rest.tokens, rest.parents) == ((3, 4), (-1, -1))
    assert rest.scores == pytest.approx([math.log(0.5 / 0.6), math.log(0.02 / 0.6)])
    assert below(TREE, 9) == EMPTY


@pytest.mark.parametrize(("budget", "tokens"), [(Budget(2, 5), (1, 3)), (Budget(9, 1), (1, 2)), (Budget(0, 3), ())])
def test_trees_are_cut_to_the_budget(budget: Budget, tokens: tuple[int, ...]) -> None:
    assert within(TREE, budget).tokens == tokens


def test_the_saved_time_of_a_round_decides() -> None:
    free, shared, both = Overlap(3.0, 1.0, 3.0), Overlap(3.0, 1.0, 4.0), Overlap(1.0, 4.0, 4.2)
    assert free.gain(1.0) == 0.25
    assert free.gain(0.5) == 0.125
    assert shared.gain(1.0) == 0.0
    assert both.gain(1.0) == pytest.approx((1 + 4 - 4.2) / 5)
    assert Overlap(0.0, 0.0, 0.0).gain(1.0) == 0.0
    assert free.pays()
    assert not free.pays(0.1)  # rarely a guess is right
    assert not shared.pays(1.0)
    assert free.note() == (
        "drafting ahead is on: with 33% of the drafts guessed it saves 8% of a round "
        "(pass 3000.0 ms, draft 1000.0 ms, both 3000.0 ms)"
    )
    assert "off: with 50% of the drafts guessed it costs 12% of a round" in shared.note(0.5)


def test_passes_and_drafts_are_measured_alone_and_at_once() -> None:
    times = iter(range(100))
    runs: list[str] = []
    found = measure_overlap(lambda: runs.append("pass"), lambda: runs.append("draft"), lambda: float(next(times)))
    assert found == Overlap(1.0, 1.0, 1.0)
    assert runs.count("pass") == runs.count("draft") == 1 + 3 + 3


@pytest.fixture
def served() -> Iterator[ProcessModel]:
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve_model, args=(theirs, TableLM(NEAR)))
    thread.start()
    yield ProcessModel(ours)
    ours.close()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_model_behind_a_pipe_has_the_same_logits_and_slots(served: ProcessModel) -> None:
    here = TableLM(NEAR)
    assert (served.vocab_size, served.max_length) == (here.vocab_size, here.max_length)
    results = []
    for model in (served, here):
        model.reserve(3, 20)
        first, second = model.open(), model.open()
        rows = [model.run(Pass([Extend(first, [1, 2, 3], [-1, 0, 0]), Extend(second, [4], [-1])])).logits.tensor()]
        (third,) = model.apply([Commit(first, [0, 2]), Commit(second, [0])]) or model.apply([Fork(first, 1)])
        rows.append(model.run(Pass([Extend(third, [5], [-1], logits_at=[0])])).logits.tensor())
        assert (first.id, second.id, third.id, model.num_open) == (0, 1, 2, 3)
        assert (first.length, third.length, third.num_tentative) == (2, 1, 1)
        model.close(second)
        assert model.open().id == 1
        results.append(torch.cat(rows))
    assert torch.equal(*results)


def test_an_error_in_the_other_process_is_raised_and_it_goes_on(served: ProcessModel) -> None:
    slot = served.open()
    with pytest.raises(ProcessEndedError, match="failed"):
        served.run(Pass([Extend(slot, [VOCAB + 5], [-1])]))
    assert served.run(Pass([Extend(slot, [3], [-1])])).logits.num_rows == 1


def test_a_model_that_cannot_be_loaded_is_told() -> None:
    ours, theirs = Pipe()
    theirs.send(ProcessEndedError("there is no such model"))
    with pytest.raises(ProcessEndedError, match="no such model"):
        ProcessModel(ours)
    theirs.close()
    with pytest.raises(ProcessEndedError, match="has ended"):
        ProcessModel(ours)


class Meeting:
    """Two threads inside their work at the same time: neither goes on without the other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.ahead: AheadDrafter | None = None
        self.count = 0


class MeetingTarget(TableLM):
    """Target whose pass waits until the drafter drafts ahead, if it is going to."""

    meeting: Meeting

    def run(self, pass_: Pass) -> PassResult:
        ahead = self.meeting.ahead
        if ahead is not None and ahead._job is not None:
            self.meeting.barrier.wait(SECONDS)
            self.meeting.count += 1
        return super().run(pass_)


class MeetingDrafter(TreeBuildingDrafter):
    """The wrapped drafter: in the thread it waits for the target's pass."""

    def __init__(self, own: Any, meeting: Meeting) -> None:
        self._builder = own._builder
        self._meeting = meeting

    def draft(self, states: Sequence[Any], budgets: Sequence[Budget]) -> list[TokenTree]:
        if threading.current_thread() is not threading.main_thread():
            self._meeting.barrier.wait(SECONDS)
        return super().draft(states, budgets)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    found = Meeting()

    def ahead_of(drafter: Drafter[Any], traits: Any, target: Any, clock: Any) -> AheadDrafter:
        found.ahead = AheadDrafter(MeetingDrafter(drafter, found), stops=traits.ahead, branches=traits.branches)
        return found.ahead

    monkeypatch.setattr(build, "ahead_of", ahead_of)
    return found


PROMPTS = [[1, 2, 3], [4, 5], [6] * 7]


def texts(llm: LLM, temperature: float) -> list[list[int]]:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=4, ignore_eos=True)
    return [list(one.token_ids) for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "draft", ["model:any,k=4,ahead=1", "model:any,tree=3-2-1,ahead=4", "model:any,tree=best-8,ahead=3"]
)
def test_it_drafts_during_the_targets_pass_and_changes_no_text(
    draft: str, temperature: float, meeting: Meeting, pipes: list[Connection]
) -> None:
    target = MeetingTarget(TABLE)
    target.meeting = meeting
    llm = LLM(target, draft, plan="fixed")
    assert texts(llm, temperature) == texts(LLM(TableLM(TABLE), "none"), temperature)
    assert meeting.ahead is not None
    counts = meeting.ahead.counts
    assert meeting.count > 5  # passes of the target, each with a draft in the middle of it
    assert counts.hits > 0
    assert counts.hits + counts.misses > 5
    llm.engine.check_integrity()
    llm.forget()


@pytest.mark.parametrize("ends", [True, False])
def test_counted_hits_decide_whether_it_goes_on(
    ends: bool, meeting: Meeting, pipes: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_module, "JUDGED_ROUNDS", 16)
    target = MeetingTarget(TABLE)
    target.meeting = meeting
    llm = LLM(target, "model:any,tree=3-2-1,ahead=4", plan="fixed")
    ahead, asked = meeting.ahead, list[float]()
    assert ahead is not None

    def judge(hits: float) -> str | None:
        asked.append(hits)
        return "drafting ahead is off: few hits" if ends else None

    ahead._judge = judge
    plain = texts(LLM(TableLM(TABLE), "none"), 1.0)
    assert texts(llm, 1.0) == plain
    ended = ahead.counts.hits + ahead.counts.misses
    assert ended >= 16
    assert len(asked) == 1
    assert 0 < asked[0] <= 1
    before = meeting.count
    assert texts(llm, 1.0) == plain
    assert (meeting.count == before) == ends
    assert ("few hits" in llm.draft_note) == ends
    llm.engine.check_integrity()


def test_sequences_with_penalties_draft_in_turn(meeting: Meeting, pipes: list[Connection]) -> None:
    target = MeetingTarget(TABLE)
    target.meeting = meeting
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=4, ignore_eos=True, presence_penalty=0.5)
    llm, plain = LLM(target, "model:any,k=3,ahead=2", plan="fixed"), LLM(TableLM(TABLE), "none")
    assert [one.token_ids for one in llm.generate(PROMPTS, params)] == [
        one.token_ids for one in plain.generate(PROMPTS, params)
    ]
    assert meeting.count == 0


def test_texts_go_on_without_drafts_when_the_process_ends(meeting: Meeting, pipes: list[Connection]) -> None:
    target = MeetingTarget(TABLE)
    target.meeting = meeting
    rounds: list[Any] = []

    def end_process(record: Any) -> None:
        rounds.append(record)
        if len(rounds) == 4:
            with socket.socket(fileno=os.dup(pipes[0].fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    llm = LLM(target, "model:any,k=4,ahead=1", plan="fixed", on_round=end_process)
    assert texts(llm, 1.0) == texts(LLM(TableLM(TABLE), "none"), 1.0)
    assert "drafting has ended" in llm.draft_note
    assert texts(llm, 0.0) == texts(LLM(TableLM(TABLE), "none"), 0.0)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("model:any,ahead=17", "from 0 to 16"),
        ("model:any,ahead=-1", "from 0 to 16"),
        ("model:any,tree=iid-2-2,ahead=2", "free choices"),
        ("model:any,map=strings,ahead=2", "map=tokens"),
    ],
)
def test_what_cannot_be_drafted_ahead_is_refused(spec: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        LLM(TableLM(TABLE), spec)
