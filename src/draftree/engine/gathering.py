"""A wait before a pass for trees of clients that are about to arrive, so that they share it.

Without it, the first of several trees begins a pass alone and the others wait for its end, although a pass over all of
them takes hardly longer. With f seconds of a pass besides its rows and clients that are away for d seconds between a
verdict and the next tree, two groups of clients in turn take 2 f for a round of all, and one group takes f + d. So
where d is below f, a pass waits for them; they share all later passes. Else it waits for a part of f at most.

A tree is expected as long after its text's last verdict as the one before. There is no wait while a text without trees
of a client could go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from draftree.core.host import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from draftree.engine.sequence import WritingSequence

__all__ = ["Absence", "Gathering", "longest_wait"]

NEAR = 0.8
"""Clients that are away for less than this share of a pass are waited for."""
SHARE, NEAR_SHARE = 0.25, 0.9
"""Longest wait as a share of a pass: for any client after the arrival of the first tree; for near ones after the end of
the last pass, too."""
SLACK = 0.1
"""How much later than expected a tree may come, as a share of a pass."""


@final
class Absence:
    """When the tree of a sequence came, and how long its client was away before. Mutated by `Gathering` only.

    Attributes:
        arrived: time of the last tree.
        left: time of the last verdict; None before the first, and while a tree is there.
        seconds: between the last verdict and the tree after it; None before that.
        has_taken: whether a tree was verified.
    """

    def __init__(self) -> None:
        self.arrived = 0.0
        self.left: float | None = None
        self.seconds: float | None = None
        self.has_taken = False

    @property
    def due(self) -> float | None:
        """When the next tree is expected; None if that is unknown."""
        return None if self.left is None or self.seconds is None else self.left + self.seconds


@final
class Gathering:
    """Expected arrivals of trees. Mutated on the engine's thread only.

    Args:
        clock: in seconds.

    Attributes:
        fixed: seconds of a pass over one row; 0 if unknown: then there is no wait.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.fixed = 0.0
        self._ended = 0.0

    def note_tree(self, absence: Absence, arrived: float) -> None:
        """Note that a tree has arrived."""
        if absence.left is not None:
            absence.seconds = max(0.0, arrived - absence.left)
        absence.arrived, absence.left = arrived, None

    def note_absent(self, absent: Sequence[WritingSequence]) -> None:
        """Note after a step that the verdicts of the absent sequences are sent now."""
        self._ended = now = self.clock()
        for sequence in absent:
            absence = sequence.given.absence if sequence.given is not None else None
            if absence is not None and absence.has_taken and absence.left is None:
                absence.left = now

    def patience(self, ready: Sequence[WritingSequence], absent: Sequence[WritingSequence]) -> float:
        """Return the seconds to wait for another tree before the next pass; 0 for none.

        Args:
            ready: sequences that can take part in the pass.
            absent: sequences that wait for a tree.
        """
        here = [sequence.given.absence for sequence in ready if sequence.given is not None]
        if not here or len(here) < len(ready) or not self.fixed:
            return 0.0
        first = min(tree.arrived for tree in here)
        since = (first, max(first, self._ended))
        away = [sequence.given.absence for sequence in absent if sequence.given is not None]
        ends = [end for one in away if (end := longest_wait(*since, one.due, one.seconds, self.fixed)) is not None]
        return max(0.0, max(ends, default=0.0) - self.clock())


def longest_wait(first: float, possible: float, due: float | None, seconds: float | None, fixed: float) -> float | None:
    """Return until when a pass waits for a tree; None if it does not.

    Args:
        first: when the first tree of the pass arrived.
        possible: when the pass could have begun: then, or at the end of the pass before.
        due: when the other one is expected; None if unknown.
        seconds: for which its client is away between a verdict and a tree; None if unknown.
        fixed: seconds of a pass over one row.
    """
    if due is None or seconds is None:
        return None
    latest = possible + NEAR_SHARE * fixed if seconds <= NEAR * fixed else first + SHARE * fixed
    return min(latest, due + SLACK * fixed) if due <= latest else None
