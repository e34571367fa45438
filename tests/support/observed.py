"""Observations of rounds, from lists of states, trees and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.core.tree import TokenTree
from draftree.core.types import Verdict
from draftree.drafters.base import Observation


def observed(states: Sequence[Any], trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> list[Observation[Any]]:
    """One observation of a round per state, with the root as the only token read."""
    rows = zip(states, trees, verdicts, strict=True)
    return [Observation(state, 1, tree, verdict) for state, tree, verdict in rows]
