"""What every drafter owes the loop about states: chunks, forks and cached prefixes change no draft and lose no slot."""

from __future__ import annotations

from typing import Any

from drafter_rig import PREDICTION, TEXTS, VOCAB, Rig, every_case, same
from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import Observation, SequenceView
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

TAILS = [[1], [2, 2], [3, 1, 4, 1]]


def views_of(rig: Rig, text: list[int]) -> list[SequenceView]:
    """New sequences that begin like this text, with a slot of the target each."""
    controls = build_controls(SamplingParams(temperature=1.0, prediction=PREDICTION), vocab_size=VOCAB, seed=7)
    return [SequenceView(History([*text, *tail]), controls, rig.target.open()) for tail in TAILS]


def drafts(rig: Rig, states: list[Any], views: list[SequenceView]) -> list[TokenTree]:
    """Trees of three rounds, in which the first way down is accepted."""
    found = []
    for _ in range(3):
        trees = rig.drafter.draft(states, [Budget(8, 4)] * len(states))
        found += trees
        rig.states, rig.views = states, views
        rig.write(trees, 2)
    return found


def opened(spec: str, draw: Draw) -> Rig:
    """A rig with some rounds after it was opened, and a tree that is not observed yet."""
    rig = Rig(spec, draw)
    rig.drafter.reserve(20, 200)
    rig.open([[*TEXTS[3], *TEXTS[2]]])
    rig.drafter.reserve(20, 200)
    for num_kept in (0, 1, 3):
        rig.write(rig.draft([Budget(8, 4)]), num_kept)
    return rig


@every_case
def test_prompt_chunks_change_no_draft(spec: str, draw: Draw) -> None:
    told, untold = (Rig(spec, draw).open(TEXTS) for _ in range(2))
    for start in range(0, max(map(len, TEXTS)), 5):
        chunks = [(state, len(text) - start) for state, text in zip(told.states, TEXTS, strict=True)]
        told.drafter.observe([Observation(state, min(5, left - 1)) for state, left in chunks if left > 1])
        told.drafter.check_integrity(told.states)
    for num_kept in (0, 2, 1):
        trees = told.draft([Budget(8, 4)] * len(TEXTS))
        assert all(same(a, b) for a, b in zip(trees, untold.draft([Budget(8, 4)] * len(TEXTS)), strict=True))
        told.write(trees, num_kept)
        untold.write(trees, num_kept)


@every_case
def test_a_fork_drafts_as_one_that_was_opened(spec: str, draw: Draw) -> None:
    rig = opened(spec, draw)
    (source,), (view,) = rig.states, rig.views
    text = view.history.tokens.tolist()
    rig.draft([Budget(8, 4)])
    for length in (len(text) - 1, 9):
        forks, fresh = views_of(rig, text[:length]), views_of(rig, text[:length])
        states = [rig.drafter.fork(source, one, length) for one in forks]
        rig.drafter.check_integrity([source, *states])
        others = [rig.drafter.open(one) for one in fresh]
        rig.tell([*states, *others], [*forks, *fresh])
        pairs = zip(drafts(rig, states, forks), drafts(rig, others, fresh), strict=True)
        assert all(same(a, b) for a, b in pairs)
        for state in (*states, *others):
            rig.drafter.close(state)
    rig.drafter.check_integrity([source])


@every_case
def test_a_cached_state_drafts_as_one_that_was_opened(spec: str, draw: Draw) -> None:
    rig = opened(spec, draw)
    (source,), (view,) = rig.states, rig.views
    text = view.history.tokens.tolist()
    rig.draft([Budget(8, 4)])
    length = len(text) - 1
    cached = rig.drafter.detach(source, length)
    if cached is not None:
        rig.drafter.check_integrity([cached])
        assert not any(slot.num_tentative for model in rig.models for slot in model._slots), "no tree is kept"
        for cut in (length, 9):
            (one, other, _), (fresh, *_) = views_of(rig, text[:cut]), views_of(rig, text[:cut])
            fork = rig.drafter.fork(cached, other, cut)
            rig.drafter.close(fork)
            cached = rig.drafter.attach(cached, one, cut)
            state = rig.drafter.open(fresh)
            rig.tell([cached, state], [one, fresh])
            pairs = zip(drafts(rig, [cached], [one]), drafts(rig, [state], [fresh]), strict=True)
            assert all(same(a, b) for a, b in pairs)
            rig.drafter.close(state)
        rig.drafter.close(cached)
    assert all(not model.num_open for model in rig.models), "nothing is left of it"
