"""Counts of a beam search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SearchStats:
    """Counts of a search.

    Attributes:
        num_passes: forward passes.
        num_rows: tokens computed in them.
        most_live: largest number of nodes in the trees of one text.
        most_slots: largest number of open slots of one text.
    """

    num_passes: int = 0
    num_rows: int = 0
    most_live: int = 0
    most_slots: int = 0
