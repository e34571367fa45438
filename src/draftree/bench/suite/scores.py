"""Scores of a suite: one value for each method and category, with bootstrap intervals over prompts. No torch.

The score of a method on a category is the geometric mean over its prompts of decode speed divided by plain decoding's
of the same prompt, first rounds excluded. Its companion that depends on no hardware is tokens per pass: tokens divided
by passes of the target, over all prompts of the category. The suite's value is the geometric mean of the categories'
values, so that a category with many prompts counts as much as one with few. Intervals are 95% percentile intervals of
the bootstrap; prompts are resampled within their category (Efron and Tibshirani, 1993). The turns of one conversation
are prompts that are resampled together, because they are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ALL", "Entry", "Estimate", "MethodScore", "scores_of"]

ALL = "all"
"""Name of the whole suite in place of a category."""
DRAWS = 2000
LEVEL = 0.95
SEED = 1
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one method did on one prompt.

    Attributes:
        category: the prompt's category.
        tokens: tokens written.
        rounds: passes of the target that wrote them.
        drafted: drafted tokens.
        accepted: drafted tokens that were written.
        tokens_per_second: decode speed, the first round excluded; None if the text ended in the first round.
        equal: whether the text equals plain decoding's.
        first_turn: id of the prompt that began the conversation; None if this is a first turn.
    """

    category: str
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    tokens_per_second: float | None
    equal: bool
    first_turn: str | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return it with six digits."""
        return {"value": round(self.value, 6), "low": round(self.low, 6), "high": round(self.high, 6)}


@dataclass(frozen=True, slots=True)
class MethodScore:
    """A method on a category, or on the whole suite.

    Attributes:
        method: name of the method.
        category: name of the category; "all" for the suite.
        prompts: number of prompts.
        score: geometric mean of speed ratios; None if no text was timed.
        tokens_per_pass: tokens per pass of the target.
        acceptance: share of drafted tokens that were written; None if nothing was drafted.
        exact: number of texts that equal plain decoding's.
    """

    method: str
    category: str
    prompts: int
    score: Estimate | None
    tokens_per_pass: Estimate
    acceptance: float | None
    exact: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a submission."""
        return {
            "method": self.method,
            "category": self.category,
            "prompts": self.prompts,
            "score": None if self.score is None else self.score.to_json(),
            "tokens_per_pass": self.tokens_per_pass.to_json(),
            "acceptance": None if self.acceptance is None else round(self.acceptance, 6),
            "exact": self.exact,
        }


def scores_of(methods: Mapping[str, Mapping[str, Entry]]) -> list[MethodScore]:
    """Return the scores of every method: the suite first, then its categories.

    Args:
        methods: for each method, plain decoding included, what it did on each prompt by the prompt's id.
    """
    plain = methods[PLAIN]
    categories: dict[str, list[str]] = {}
    for prompt, entry in plain.items():
        categories.setdefault(entry.category, []).append(prompt)
    found = []
    for name, entries in methods.items():
        found.append(_score(name, ALL, list(categories.values()), entries, plain))
        found += [_score(name, category, [prompts], entries, plain) for category, prompts in categories.items()]
    return found


def _score(
    name: str,
    category: str,
    strata: Sequence[Sequence[str]],
    entries: Mapping[str, Entry],
    plain: Mapping[str, Entry],
) -> MethodScore:
    each = [entries[prompt] for prompts in strata for prompt in prompts]
    drafted = sum(entry.drafted for entry in each)
    talks = [_conversations(prompts, plain) for prompts in strata]
    timed = [logs for stratum in talks if len(logs := _log_sums(stratum, entries, plain))]
    counts = [
        np.asarray(
            [(sum(entries[p].tokens for p in talk), sum(entries[p].rounds for p in talk)) for talk in stratum], float
        )
        for stratum in talks
    ]
    return MethodScore(
        method=name,
        category=category,
        prompts=len(each),
        score=_estimate(timed, _mean_log) if timed else None,
        tokens_per_pass=_estimate(counts, _log_ratio),
        acceptance=sum(entry.accepted for entry in each) / drafted if drafted else None,
        exact=sum(entry.equal for entry in each),
    )


def _conversations(prompts: Sequence[str], plain: Mapping[str, Entry]) -> list[list[str]]:
    """Return the prompts of each conversation; a prompt without later turns is one by itself."""
    found: dict[str, list[str]] = {}
    for prompt in prompts:
        found.setdefault(plain[prompt].first_turn or prompt, []).append(prompt)
    return list(found.values())


def _log_sums(talks: Sequence[Sequence[str]], entries: Mapping[str, Entry], plain: Mapping[str, Entry]) -> np.ndarray:
    """Return the sum of the logarithms of speed ratios and their number, for every conversation with a timed text."""
    found = []
    for talk in talks:
        logs = [
            np.log(fast / slow)
            for prompt in talk
            if (fast := entries[prompt].tokens_per_second) is not None
            and (slow := plain[prompt].tokens_per_second) is not None
        ]
        if logs:
            found.append((sum(logs), len(logs)))
    return np.asarray(found, float)


def _mean_log(values: np.ndarray) -> np.ndarray:
    """Return the mean over prompts of each draw, shape (draws, conversations, 2) to (draws,)."""
    sums = values.sum(axis=1)
    return np.asarray(sums[:, 0] / sums[:, 1])


def _log_ratio(values: np.ndarray) -> np.ndarray:
    """Return the logarithm of tokens by rounds of each draw, shape (draws, conversations, 2) to (draws,)."""
    sums = values.sum(axis=1)
    return np.asarray(np.log(sums[:, 0] / sums[:, 1]))


def _estimate(strata: Sequence[np.ndarray], log_value: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """Return the geometric mean over strata of a value, and its interval by resampling conversations."""
    draws = np.random.default_rng(SEED)
    value = np.mean([log_value(values[None])[0] for values in strata])
    drawn = [log_value(values[draws.integers(0, len(values), (DRAWS, len(values)))]) for values in strata]
    low, high = np.quantile(np.mean(drawn, axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(np.exp(value)), float(np.exp(low)), float(np.exp(high)))
