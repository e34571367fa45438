"""A draft model with a short context drafts the same after a fork, from a cached state and opened anew."""

from __future__ import annotations

import pytest

from draftree.core.tree import Draw
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import SequenceView
from draftree.drafters.growing.shapes import parse_shape
from draftree.drafters.growing.stepping import ModelStepper
from draftree.drafters.growing.tree_growth import Growth
from draftree.models.table import TableLM, hashed
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

VOCAB = 9
CONTEXT = 24


def view(tokens: list[int]) -> SequenceView:
    return SequenceView(History(tokens), build_controls(SamplingParams(), vocab_size=VOCAB, seed=1))


def text(length: int) -> list[int]:
    return [(i * i + i // 5) % VOCAB for i in range(length)]


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("rounds", [0, 2, 7])
@pytest.mark.parametrize("length", [5, 12, 20, 23, 24, 25, 40, 60])
@pytest.mark.parametrize("added", [0, 1, 4, 30])
def test_windows_are_those_of_the_text(length: int, added: int, rounds: int, is_cached: bool) -> None:
    model = TableLM(hashed(VOCAB, seed=1, scale=2.0), max_length=CONTEXT)
    growth = Growth(ModelStepper(model), shape=parse_shape("chain", 3), draw=Draw.FREE, shares_noise=True)
    source_view = view(text(length))
    source = growth.open(source_view)
    growth.grow([source], [Budget(3, 3)])
    for token in range(rounds):
        source_view.history.append([token])
        growth.observe([source], [Verdict((), token)])
        growth.grow([source], [Budget(3, 3)])
    tokens = text(length) + [7] * added
    one, other = view(tokens), view(tokens)
    fresh = growth.open(other)
    if is_cached:
        source = growth.detach(source)
        state = growth.attach(source, one)
    else:
        state = growth.fork(source, one)
    growth.check_integrity([state, fresh, *([] if is_cached else [source])])
    for token in range(12):
        (tree,), (wanted,) = growth.grow([state], [Budget(3, 3)]), growth.grow([fresh], [Budget(3, 3)])
        assert tree == wanted
        for state_view, own in ((one, state), (other, fresh)):
            state_view.history.append([token % VOCAB])
            growth.observe([own], [Verdict((), token % VOCAB)])
