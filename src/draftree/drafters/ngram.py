"""Prompt lookup: what followed the last few tokens when they stood in the text before is guessed to follow again.

The longest run of last tokens that occurs earlier in prompt or output is looked for, at most `max` and at least
`min` of them; of several places the latest counts. No model, no state; a round without a match is plain decoding.

Source: prompt lookup decoding (A. Saxena, 2023); n-gram assisted generation as in transformers and vLLM.
Its scores and its confidence, for planners, go by the length of the match. Costs a scan over the tokens, some tens of
microseconds. Pays where text is copied: rewriting code, summaries, answers from given documents. On open prompts
matches are rare and often wrong: little is won, and each wrong guess makes the pass wider for nothing.
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
from draftree.drafters.base import DraftTraits, SequenceView
from draftree.drafters.lookup.chains import ChainDrafter, require_length

LONGEST = 32
"""Tokens of a match at most that its scores go by."""
ESCAPE = 2.5
"""As counting drafters have it: a match of 1, 2, 4, 8 tokens goes on in 0.29, 0.53, 0.76, 0.90 of all cases."""


@final
class NgramDrafter(ChainDrafter):
    """Copies what followed the longest earlier match."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`max` and `min`: length of the run that must match; `k`: tokens ahead at most."""

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
        """A chain, with confidence by the length of the match."""
        return replace(super().describe(config), gives_confidence=True)

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        """The tokens behind the best match."""
        count = min(budget.num_nodes, budget.depth, self._config.k)
        tokens = state.history.tokens
        start = find_continuation(tokens, longest=self._config.max, shortest=self._config.min) if count else None
        if start is None:
            return EMPTY
        scores = scores_of(run_before(tokens, start), min(count, len(tokens) - start))
        if budget.min_confidence:
            scores = confident(scores, budget.min_confidence)
        return chain(tokens[start : start + len(scores)], scores=scores, draw=self._draw)


def find_continuation(tokens: np.ndarray, *, longest: int, shortest: int) -> int | None:
    """Index behind the latest, longest earlier occurrence of the last tokens.

    Args:
        tokens: integers of shape (tokens,).
        longest: tokens that are compared at most.
        shortest: tokens that must match at least.
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
    """How many tokens before `start` are the last ones of the text, up to `LONGEST`."""
    span = min(start, len(tokens) - 1, LONGEST)
    differs = np.flatnonzero(tokens[start - span : start] != tokens[len(tokens) - span :])
    return span if not len(differs) else span - 1 - int(differs[-1])


def scores_of(length: int, count: int) -> list[float]:
    """Cumulated log-chances of copied tokens: the longer the run that matches, the likelier it goes on."""
    scores, total = [], 0.0
    for place in range(count):
        votes = (length + place) ** 1.5
        total += math.log(votes / (votes + ESCAPE))
        scores.append(total)
    return scores


def confident(scores: Sequence[float], least: float) -> list[float]:
    """The scores up to and including the first token that is less likely than `least` behind those before it."""
    for place, (score, before) in enumerate(zip(scores, [0.0, *scores], strict=False)):
        if math.exp(score - before) < least:
            return list(scores[: place + 1])
    return list(scores)
