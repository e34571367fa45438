"""Observations of rounds, from lists of states, trees and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from draftree.core.tree import TokenTree
from draftree.core.types import Verdict
from draftree.drafters.base import Observation


def observed(
    states: Sequence[Any],
    trees: Sequence[TokenTree],
    verdicts: Sequence[Verdict],
    hidden: Sequence[Tensor | None] | None = None,
) -> list[Observation[Any]]:
    """One observation of a round per state, with the root as the only token read."""
    rows = zip(states, trees, verdicts, hidden or [None] * len(states), strict=True)
    return [Observation(state, 1, *rest) for state, *rest in rows]
