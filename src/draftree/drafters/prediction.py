"""Drafts from the text that the user expects (`SamplingParams(prediction=…)`), and finds back into it after edits.

As long as the output is the prediction, what comes next in it is drafted. Where the output leaves it, the last
tokens of the output are looked for in the prediction, ahead of the place where it was left before behind it. The
longer they match, the more is drafted, and two that match are the new place. A request without a prediction is
decoded plainly, unless another drafter is merged with this one (`prediction+suffix`).

Source: Predicted Outputs of OpenAI's API; estimates as in `counting.py`. Costs microseconds, and a scan of the
prediction while its place is lost. Pays where the user holds most of the answer: edits of code and documents. Loses
little on a wrong prediction: what is not found is not drafted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftTraits, SequenceView
from draftree.drafters.lookup.counting import LONGEST, CountedText, CountingDrafter, Match, require_tree

TRUST = 4
"""The beginning of the prediction counts as if so many tokens had matched."""
FOUND = 2
"""Tokens that must match for a place to become the place; while fewer do, others are looked for."""
NUM_PLACES = 8
"""Of the places that are found these many count, the best, each half as much as the one before."""


@dataclass(slots=True)
class PredictionState(CountedText):
    """A sequence and its place in the prediction. Mutated as the text is read.

    Attributes:
        prediction: its tokens.
        place: the token of the prediction that is expected next, or was when the output left it.
        run: tokens that match up to there.
        is_lost: whether the last token was another than the one expected.
        num_read: tokens of the output that were looked at.
    """

    prediction: np.ndarray
    place: int = 0
    run: int = TRUST
    is_lost: bool = False
    num_read: int = 0


@final
class PredictionDrafter(CountingDrafter[PredictionState]):
    """Follows the prediction."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`k`: levels at most; `nodes`: nodes of a tree at most; `width`: children of a node at most, 1 for a chain.

        `max`: tokens that are compared at most; `floor`: nodes that are less likely to survive are left out.
        """

        k: int = 16
        nodes: int = 16
        width: int = 3
        max: int = 24
        floor: float = 0.2

        def __post_init__(self) -> None:
            require_tree("prediction", self)
            if not 1 <= self.max <= LONGEST:
                raise ConfigurationError(
                    f"option max of drafter 'prediction' is {self.max}: it must be from 1 to {LONGEST}"
                )

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        """A tree, from predictions alone."""
        return replace(super().describe(config), reads_predictions=True)

    def open(self, sequence: SequenceView) -> PredictionState:
        """At the beginning of the prediction."""
        return PredictionState(sequence, np.array(sequence.controls.prediction, np.int64))

    def _voters(self, state: PredictionState, depth: int) -> list[Match]:
        if not len(state.prediction):
            return []
        read(state)
        return _places(state, self._config.max, depth)


def read(state: PredictionState) -> None:
    """Take in the tokens that were written since the last time."""
    prediction, output = state.prediction, state.view.history.output
    for token in output[state.num_read :].tolist():
        if state.place < len(prediction) and prediction[state.place] == token:
            state.place, state.run, state.is_lost = state.place + 1, min(state.run + 1, LONGEST), False
        else:
            state.run, state.is_lost = 0, True
    state.num_read = len(output)


def find_places(prediction: np.ndarray, tail: np.ndarray, *, ahead_of: int) -> list[tuple[int, int]]:
    """Where the tail may go on in the prediction, the likeliest place first.

    Args:
        prediction: tokens.
        tail: the last tokens of the output, at least one.
        ahead_of: places from here on come before earlier ones with as long a match, the nearest first.

    Returns:
        Pairs of the token that would be next, and how many tokens match before it.
    """
    ends = np.flatnonzero(prediction[:-1] == tail[-1])
    lengths = np.ones(len(ends), np.int64)
    alive = np.arange(len(ends))
    for length in range(2, len(tail) + 1):
        alive = alive[ends[alive] >= length - 1]
        alive = alive[prediction[ends[alive] - (length - 1)] == tail[-length]]
        if not len(alive):
            break
        lengths[alive] = length
    places = ends + 1
    order = np.lexsort((np.abs(places - ahead_of), places < ahead_of, -lengths))[:NUM_PLACES]
    return list(zip(places[order].tolist(), lengths[order].tolist(), strict=True))


def _places(state: PredictionState, longest: int, depth: int) -> list[Match]:
    """The place that is followed, and others while it is in doubt; the best of these may become the place."""
    voters = [] if state.is_lost else [_voter(state, state.place, state.run, depth)]
    if state.run >= FOUND or not state.num_read:
        return voters
    places = find_places(state.prediction, state.view.history.output[-longest:], ahead_of=state.place)
    for rank, (place, length) in enumerate(places):
        if state.is_lost or place != state.place:
            voters.append(_voter(state, place, length, depth, weight=0.5**rank))
    if places and places[0][1] >= FOUND:
        (state.place, state.run), state.is_lost = places[0], False
    return voters


def _voter(state: PredictionState, place: int, length: int, depth: int, *, weight: float = 1.0) -> Match:
    followers = state.prediction[place : place + depth].tolist()
    return Match(length, [*followers, *[-1] * (depth - len(followers))], weight)
