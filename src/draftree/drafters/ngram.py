"""Prompt lookup: copies the tokens that followed an earlier occurrence of the last few tokens.

The longest suffix of at most `max` and at least `min` tokens that occurs earlier in prompt or output is searched; the
latest occurrence is used. It needs no model and no state. A round without a match is plain decoding.

Source: prompt lookup decoding (A. Saxena, 2023); n-gram assisted generation as in transformers and vLLM.
Scores and confidence, for planners, depend on the length of the match. Costs a scan over the tokens, some tens of
microseconds. Gains if text is copied: rewriting code, summaries, answers from given documents. On open prompts matches
are rare and often wrong: the gain is small, and each wrong token makes the pass wider.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, TokenTree, chain
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, SequenceView, require_range
from draftree.drafters.lookup.counting import ESCAPE, VOTES
from draftree.drafters.lookup.occurrences import SEPARATOR

LONGEST = 32
"""Maximum length of a match in scores."""


@final
class NgramDrafter(Drafter[SequenceView]):
    """Drafter that copies the tokens after the longest earlier match."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`max` and `min`: limits of the length of a match; `k`: maximum number of tokens."""

        max: int = 4
        min: int = 2
        k: int = 10

        def __post_init__(self) -> None:
            if not 1 <= self.min <= self.max:
                raise ConfigurationError(
                    f"drafter 'ngram' has min={self.min} and max={self.max}: they must be at least 1, max not below min"
                )
            require_range("ngram", self, "k")

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        return replace(super().describe(config), gives_confidence=True)

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        count = min(budget.num_nodes, budget.depth, self._config.k)
        tokens = state.history.tokens
        if state.source:
            tokens = np.concatenate([np.array([*state.source, SEPARATOR], dtype=np.int64), tokens])
        start = find_continuation(tokens, longest=self._config.max, shortest=self._config.min) if count else None
        if start is None:
            return EMPTY
        end = len(state.source) if start < len(state.source) else len(tokens)
        scores = scores_of(run_before(tokens, start), min(count, end - start))
        if budget.min_confidence:
            scores = confident(scores, budget.min_confidence)
        return chain(tokens[start : start + len(scores)], scores=scores, draw=self._draw)


def find_continuation(tokens: np.ndarray, *, longest: int, shortest: int) -> int | None:
    """Return the index after the latest, longest earlier occurrence of the last tokens.

    Args:
        tokens: integers of shape (tokens,).
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    start = None
    for length in range(1, min(longest, last) + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[last - (length - 1)]]
        if not len(ends):
            break
        if length >= shortest:
            start = int(ends[-1]) + 1
    return start


def run_before(tokens: np.ndarray, start: int) -> int:
    """Return how many tokens before `start` equal the last ones of the text, up to `LONGEST`."""
    span = min(start, len(tokens) - 1, LONGEST)
    differs = np.flatnonzero(tokens[start - span : start] != tokens[len(tokens) - span :])
    return span if not len(differs) else span - 1 - int(differs[-1])


def scores_of(length: int, count: int) -> list[float]:
    """Return cumulative log-probabilities of copied tokens, by the length of the match."""
    return list(accumulate(math.log(votes / (votes + ESCAPE)) for votes in VOTES[length : length + count]))


def confident(scores: Sequence[float], least: float) -> list[float]:
    """Return the scores up to the first token with a conditional probability below `least`, included."""
    pairs = enumerate(zip(scores, [0.0, *scores], strict=False), 1)
    return list(scores[: next((count for count, (score, before) in pairs if math.exp(score - before) < least), None)])
