"""Closed forms of acceptance and speed-up, for comparison with measurements.

Distributions are arrays that sum to 1; `acceptance` is the probability that one drafted token is accepted, `length` the
tokens of a drafted chain, `cost` the seconds of a drafter's pass divided by those of a target pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np


def token_acceptance(target: np.ndarray, draft: np.ndarray) -> float:
    """Return the probability that `token` accepts a drawn token: sum of min(T, D), or 1 minus the total variation.

    No rule accepts a single drawn token more often. Source: arXiv 2211.17192, theorem 3.5.
    """
    return float(np.minimum(target, draft).sum())


def coupled_acceptance(target: np.ndarray, draft: np.ndarray) -> float:
    """Return the probability that target and drafter choose the same token: sum_i 1 / sum_j max(T_j/T_i, D_j/D_i).

    Sorting by T/D makes every inner sum a head of one distribution and a tail of the other: O(vocab * log vocab).
    """
    used = (target > 0) | (draft > 0)
    t = target[used].astype(np.float64)
    d = draft[used].astype(np.float64)
    with np.errstate(divide="ignore"):
        order = np.argsort(np.log(t) - np.log(d))
    t = t[order]
    d = d[order]
    # for token i, T_j / T_i counts from i on (where T_j / D_j is not smaller), D_j / D_i before
    tail = np.cumsum(t[::-1])[::-1]
    head = np.cumsum(d) - d
    both = (t > 0) & (d > 0)
    with np.errstate(over="ignore"):  # a token of almost no probability adds 1 / inf
        return float((1 / (tail[both] / t[both] + head[both] / d[both])).sum())


def multistep_acceptance(target: np.ndarray, draft: np.ndarray, *, children: int) -> float:
    """Return the probability that `multistep` accepts one of several children drawn from the draft distribution."""
    rejected = 1.0
    for _ in range(children):
        rejected *= 1 - token_acceptance(target, draft)
        rest = np.maximum(target - draft, 0)
        if rest.sum() == 0:
            return 1.0
        target = rest / rest.sum()
    return 1 - rejected


def recursive_acceptance(target: np.ndarray, draft: np.ndarray, drawn: Iterable[int]) -> float:
    """Return the probability that `recursive` accepts one of these tokens, drawn without replacement.

    Averaged over draws it is the rule's acceptance; for one token its average is `token_acceptance`.
    """
    left = target.astype(np.float64)
    distribution = draft.astype(np.float64)
    rejected = 1.0
    for token in drawn:
        if distribution[token] <= 0:
            break
        rejected *= 1 - min(1.0, left[token] / distribution[token])
        left = np.maximum(left - distribution, 0)
        if rejected == 0 or left.sum() == 0:
            return 1.0 - rejected
        left /= left.sum()
        distribution = distribution.copy()
        distribution[token] = 0.0
        if distribution.sum() == 0:
            break
        distribution /= distribution.sum()
    return 1.0 - rejected


def covered(target: np.ndarray, tokens: Iterable[int]) -> float:
    """Return the probability that the target's choice is among tokens that were chosen independently of it."""
    return float(target[list(set(tokens))].sum())


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the expected tokens per round, bonus included, if all drafted tokens have the same acceptance.

    (1 - a^(length + 1)) / (1 - a). Source: arXiv 2211.17192, equation 1.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be from 0 to 1, got {acceptance}")
    if length < 0:
        raise ValueError(f"length must be 0 or more, got {length}")
    return float(sum(acceptance**depth for depth in range(length + 1)))


def walltime_improvement(acceptance: float, length: int, cost: float) -> float:
    """Return plain seconds divided by speculative seconds: expected tokens / (length * cost + 1).

    Assumes that a target pass over length + 1 tokens takes as long as one over one token. Source: arXiv 2211.17192,
    theorem 3.8.
    """
    return expected_tokens(acceptance, length) / (length * cost + 1)


def operations_factor(acceptance: float, length: int, ratio: float) -> float:
    """Return the operations of speculative decoding divided by those of plain decoding.

    `ratio` is the drafter's operations per token divided by the target's.
    """
    return (length * ratio + length + 1) / expected_tokens(acceptance, length)


def best_length(acceptance: float, cost: float, *, longest: int = 64) -> int:
    """Return the length with the best `walltime_improvement`, the shortest among equals; 0 if drafting does not pay."""
    return int(np.argmax([walltime_improvement(acceptance, length, cost) for length in range(longest + 1)]))


CHILDREN = (1, 2, 4)


def kept_by_rule(target: np.ndarray, draft: np.ndarray, draws: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Return the probability that one of 1, 2, 4 children is accepted, by verifier.

    `draws` are several draws of four tokens without replacement from the drafter's distribution, in order. `token` and
    `coupled` are for one child; `recursive` is exact for each draw and averaged; so is `match`, for children drawn with
    independent noise; `likeliest` is for the drafter's most likely tokens under a verifier that searches the target's
    choice among them.
    """
    order = np.argsort(-draft, kind="stable")[: CHILDREN[-1]]
    return {
        "token": [token_acceptance(target, draft)],
        "coupled": [coupled_acceptance(target, draft)],
        "multistep": [multistep_acceptance(target, draft, children=count) for count in CHILDREN],
        "recursive": [fmean(recursive_acceptance(target, draft, row[:count]) for row in draws) for count in CHILDREN],
        "match": [fmean(covered(target, row[:count]) for row in draws) for count in CHILDREN],
        "likeliest": [covered(target, order[:count]) for count in CHILDREN],
    }
