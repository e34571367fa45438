"""Acceptance of every verifier for one, two and four children, from a pair of distributions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from draftree.analysis.theory import (
    coupled_acceptance,
    covered,
    multistep_acceptance,
    recursive_acceptance,
    token_acceptance,
)

CHILDREN = (1, 2, 4)


def kept_by_rule(target: np.ndarray, draft: np.ndarray, draws: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Return the probability that one of 1, 2, 4 children is accepted, by verifier.

    Args:
        target: the target's distribution.
        draft: the drafter's distribution.
        draws: several draws of four tokens without replacement from the drafter's distribution, in order.

    Returns:
        `token` and `coupled` for one child, by closed form; `multistep` by closed form; `recursive` exactly for each
        draw and averaged; `match` likewise, for children drawn with independent noise; `likeliest`: the
        drafter's most likely tokens under a verifier that searches the target's choice among them.
    """
    order = np.argsort(-draft, kind="stable")[: CHILDREN[-1]]
    return {
        "token": [token_acceptance(target, draft)],
        "coupled": [coupled_acceptance(target, draft)],
        "multistep": [multistep_acceptance(target, draft, children=count) for count in CHILDREN],
        "recursive": [_mean(recursive_acceptance(target, draft, row[:count]) for row in draws) for count in CHILDREN],
        "match": [_mean(covered(target, row[:count]) for row in draws) for count in CHILDREN],
        "likeliest": [covered(target, order[:count]) for count in CHILDREN],
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
