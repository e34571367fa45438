"""Predicted outputs: drafts from the text that the user expects (`SamplingParams(prediction=…)`).

While the output equals the prediction, its next tokens are drafted. After a difference, the last tokens of the output
are searched in the prediction, first after the point of the difference and then before it. Longer matches give longer
drafts, and a match of two tokens is the new position. A request without a prediction is decoded plainly, unless another
drafter is merged with this one (`prediction+suffix`).

Source: Predicted Outputs of OpenAI's API; estimates as in `counting.py`. Costs microseconds, and a scan of the
prediction while its position is unknown. Gains if the user has most of the answer: edits of code and documents. Loses
little with a wrong prediction, because unmatched text is not drafted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np

from draftree.drafters.base import DraftTraits, SequenceView, require_range
from draftree.drafters.lookup.counting import LONGEST, CountedText, CountingDrafter, require_tree
from draftree.drafters.lookup.occurrences import Match

TRUST = 4
"""Length of match assumed at the start of the prediction."""
FOUND = 2
"""Length of match from which other positions are no longer searched."""
NUM_PLACES = 8
"""Maximum number of positions in use, each with half the weight of the one before."""


@dataclass(slots=True)
class PredictionState(CountedText):
    """Sequence and its position in the prediction. Mutated as the text is read.

    Attributes:
        place: index of the next expected token, or of the one at which the output differed.
        run: number of matching tokens before it.
        is_lost: whether the last token differed from the expected one.
    """

    prediction: np.ndarray
    place: int = 0
    run: int = TRUST
    is_lost: bool = False
    num_read: int = 0


@final
class PredictionDrafter(CountingDrafter[PredictionState]):
    """Drafter that follows the prediction."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`k`: maximum number of levels; `nodes`: maximum number of nodes; `max`: maximum length of a match.

        `width`: maximum number of children, 1 for a chain; `floor`: minimum estimated survival of a node.
        """

        k: int = 16
        nodes: int = 16
        width: int = 3
        max: int = 24
        floor: float = 0.2

        def __post_init__(self) -> None:
            require_tree("prediction", self)
            require_range("prediction", self, "max", most=LONGEST)

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        return replace(super().describe(config), reads_predictions=True)

    def open(self, sequence: SequenceView) -> PredictionState:
        return PredictionState(sequence, np.array(sequence.controls.prediction, np.int64))

    def _matches(self, state: PredictionState, depth: int) -> list[Match]:
        """Return the current position and, while it is uncertain, others; the best of them may replace it."""
        prediction = state.prediction
        output = state.view.history.output
        if not len(prediction):
            return []
        for token in output[state.num_read :].tolist():
            if state.place < len(prediction) and prediction[state.place] == token:
                state.place, state.run, state.is_lost = state.place + 1, min(state.run + 1, LONGEST), False
            else:
                state.run = 0
                state.is_lost = True
        state.num_read = len(output)

        def match(place: int, length: int, weight: float = 1.0) -> Match:
            followers = prediction[place : place + depth].tolist()
            return Match(length, [*followers, *[-1] * (depth - len(followers))], weight)

        matches = [] if state.is_lost else [match(state.place, state.run)]
        if state.run >= FOUND or not state.num_read:
            return matches
        places = find_places(prediction, output[-self._config.max :], ahead_of=state.place)
        for rank, (place, length) in enumerate(places):
            if state.is_lost or place != state.place:
                matches.append(match(place, length, 0.5**rank))
        if places and places[0][1] >= FOUND:
            (state.place, state.run), state.is_lost = places[0], False
        return matches


def find_places(prediction: np.ndarray, tail: np.ndarray, *, ahead_of: int) -> list[tuple[int, int]]:
    """Return positions in the prediction that match the tail, the most likely first.

    Args:
        ahead_of: of equally long matches, those from here on come first, the nearest first.

    Returns:
        Pairs of the index of the next token and the length of the match.
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
