"""Division of a batch by the choice of each sequence: one of several drafters, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLAIN = -1
"""The choice of plain decoding."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The state of a sequence, and what it belongs to.

    Attributes:
        choice: index of the drafter, or `PLAIN`.
        own: the state that this drafter, or its planner, gave; None for `PLAIN`.
    """

    choice: int
    own: Any = None


def rows_by_choice(states: Sequence[Routed]) -> dict[int, list[int]]:
    """Return the places of the states of each choice, ascending; those of `PLAIN` are left out."""
    rows: dict[int, list[int]] = {}
    for row, state in enumerate(states):
        if state.choice != PLAIN:
            rows.setdefault(state.choice, []).append(row)
    return rows
