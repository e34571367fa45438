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
from typing import final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, TokenTree, chain
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, SequenceView, require_length
from draftree.drafters.lookup.occurrences import SEPARATOR

LONGEST = 32
"""Maximum length of a match in scores."""
ESCAPE = 2.5
"""Probability that a match continues, as in `lookup/counting.py`: 0.29, 0.53, 0.76, 0.90 for 1, 2, 4, 8 tokens."""


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
            require_length("ngram", self.k)

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        return replace(super().describe(config), gives_confidence=True)

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        count = min(budget.num_nodes, budget.depth, self._config.k)
        tokens = with_source(state)
        start = find_continuation(tokens, longest=self._config.max, shortest=self._config.min) if count else None
        if start is None:
            return EMPTY
        end = len(state.source) if start < len(state.source) else len(tokens)
        scores = scores_of(run_before(tokens, start), min(count, end - start))
        if not scores:
            return EMPTY
        if budget.min_confidence:
            scores = confident(scores, budget.min_confidence)
        return chain(tokens[start : start + len(scores)], scores=scores, draw=self._draw)


def with_source(view: SequenceView) -> np.ndarray:
    """Return the text, after the tokens of its source and a separator if it has one, int64 of shape (tokens,)."""
    if not view.source:
        return view.history.tokens
    return np.concatenate([np.array([*view.source, SEPARATOR], dtype=np.int64), view.history.tokens])


def find_continuation(tokens: np.ndarray, *, longest: int, shortest: int) -> int | None:
    """Return the index after the latest, longest earlier occurrence of the last tokens.

    Args:
        tokens: integers of shape (tokens,).
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    found = None
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[last - (length - 1)]] if last >= length - 1 else ends[:0]
        if not len(ends):
            break
        if length >= shortest:
            found = int(ends[-1]) + 1
    return found


def run_before(tokens: np.ndarray, start: int) -> int:
    """Return how many tokens before `start` equal the last ones of the text, up to `LONGEST`."""
    span = min(start, len(tokens) - 1, LONGEST)
    differs = np.flatnonzero(tokens[start - span : start] != tokens[len(tokens) - span :])
    return span if not len(differs) else span - 1 - int(differs[-1])


def scores_of(length: int, count: int) -> list[float]:
    """Return cumulative log-probabilities of copied tokens, by the length of the match."""
    scores, total = [], 0.0
    for place in range(count):
        votes = (length + place) ** 1.5
        total += math.log(votes / (votes + ESCAPE))
        scores.append(total)
    return scores


def confident(scores: Sequence[float], least: float) -> list[float]:
    """Return the scores up to the first token with a conditional probability below `least`, included."""
    for place, (score, before) in enumerate(zip(scores, [0.0, *scores], strict=False)):
        if math.exp(score - before) < least:
            return list(scores[: place + 1])
    return list(scores)
