"""Beams that compete, and how the candidates of a step are divided among finished texts and beams that go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from draftree.beam.strategies.base import Candidate
from draftree.beam.trunk import Tip

if TYPE_CHECKING:
    from draftree.beam.finished import Pool

Columns = tuple[list[float], list[int], list[float]]
"""Scores, places and log-probabilities of the candidates of a group."""


@dataclass(slots=True, eq=False)
class Beam:
    """A text in progress.

    Attributes:
        tips: end of the beam in the forest of each model.
        draft_tips: end of the beam in the forests of the drafter.
        tokens: generated tokens.
        score: cumulative log-probability.
        logprobs: what each token added to it.
        ranks: for each token the rank of the beam that it continued.
        state: state of the strategy.
        trie_node: node of the trie that the text has reached.
        attention: for each token the weights of cross-attention with which it was predicted, if they are wanted.
    """

    tips: list[Tip]
    tokens: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    state: Any = None
    trie_node: int = 0
    draft_tips: list[Tip] = field(default_factory=list)
    attention: tuple[np.ndarray, ...] = ()

    @property
    def is_scored(self) -> bool:
        """Whether every model has scored it."""
        return all(tip.row is not None for tip in self.tips)


@dataclass(slots=True)
class Group:
    """Beams that compete, and their finished hypotheses."""

    width: int
    beams: list[Beam]
    pool: Pool
    is_done: bool = False

    @property
    def best(self) -> float:
        """Highest cumulative log-probability of its beams; -inf without any."""
        return max((beam.score for beam in self.beams), default=-math.inf)

    def candidates(self, beams: Sequence[Beam], columns: Columns, vocab_size: int) -> list[Candidate]:
        """Return the possible candidates of some of its beams.

        Args:
            beams: the beams whose rows were ranked.
            columns: as they were read; a place is the index in `beams` times `vocab_size` plus the token.
            vocab_size: width of the rows.
        """
        rank = {id(beam): index for index, beam in enumerate(self.beams)}
        found = []
        for score, place, logprob in zip(*columns, strict=True):
            if score > -math.inf:
                parent = beams[place // vocab_size]
                found.append(Candidate(parent, rank[id(parent)], place % vocab_size, score, logprob))
        return found


@dataclass(slots=True)
class Division:
    """Candidates of a step that finish, with the reason, in order, and those that go on.

    Attributes:
        finished: candidates with their reasons.
        going: candidates that go on.
        lowest: score of the last candidate that was needed; -inf if more candidates could change the division.
    """

    finished: list[tuple[Candidate, str]] = field(default_factory=list)
    going: list[Candidate] = field(default_factory=list)
    lowest: float = -math.inf


def divide(
    candidates: Sequence[Candidate],
    reason_of: Callable[[int], str | None],
    *,
    width: int,
    rule: str,
    is_last: bool,
    is_ranked: bool,
) -> Division:
    """Divide the candidates of a group.

    Args:
        candidates: in the order of the strategy.
        reason_of: function from a place to the reason why that candidate ends; None if it goes on.
        width: maximum number of beams.
        rule: as `BeamSearchParams.eos_rule`.
        is_last: whether this is the last token before the limit.
        is_ranked: whether the order is that in which candidates go on; otherwise the best of all go on.
    """
    found = Division()
    room = width if is_ranked else len(candidates)
    for place, candidate in enumerate(candidates):
        is_beyond = rule == "walk" or place >= width
        if rule != "any" and is_beyond and (len(found.going) == room or (is_last and rule == "top_k")):
            found.lowest = candidates[place - 1].score
            break
        may_finish = rule != "top_k" or place < width
        reason = reason_of(place)
        if reason is not None and may_finish:
            found.finished.append((candidate, reason))
        elif reason is None and len(found.going) < room and (may_finish or not is_last):
            found.going.append(candidate)
            if is_last:
                found.finished.append((candidate, "length"))
    return found
