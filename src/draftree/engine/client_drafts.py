"""Drafts that come from clients: a sequence takes part in one round for each of its client's trees, and pauses between.

A paused sequence keeps its slot. If another sequence needs the room, the one that has paused longest is parked: its
slot becomes a cached prefix, and the sequence is queued again when its next tree arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.tree import TokenTree
from draftree.engine.memory import SlotAllocator
from draftree.engine.scheduler import Scheduler
from draftree.engine.sequence import WritingSequence

NEAR = 0.8  # clients that are away for less than this share of a pass are waited for
SHARE, NEAR_SHARE = 0.25, 0.9
"""Longest wait as a share of a pass: for any client after the arrival of the first tree; for near ones after the end of
the last pass, too."""
SLACK = 0.1  # how much later than expected a tree may come, as a share of a pass


@final
class DraftBatcher:
    """Short delay of a pass so that client drafts on their way can share it. Mutated on the engine's thread only.

    Without it, the first of several trees begins a pass alone and the others wait for its end, although a pass over all
    of them takes hardly longer. With f seconds of a pass besides its rows and clients that are away for d seconds
    between a verdict and the next tree, two groups of clients in turn take 2 f for a round of all, and one group takes
    f + d. Where d is below f, a pass waits for them, and they share all later passes; else it waits for a part of f at
    most. A tree is expected as long after its sequence's last verdict as the one before. There is no wait while a
    sequence that needs no client could go on.

    Args:
        clock: in seconds.

    Attributes:
        fixed: seconds of a pass over one row; 0 if unknown: then there is no wait.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.fixed = 0.0
        self._ended = 0.0

    def note_absent(self, absent: Sequence[WritingSequence]) -> None:
        """Note after a step that the verdicts of the absent sequences are sent now."""
        self._ended = now = self.clock()
        for sequence in absent:
            drafts = sequence.client_drafts
            if drafts is not None and drafts.has_taken and drafts.left is None:
                drafts.left = now

    def patience(self, ready: Sequence[WritingSequence], absent: Sequence[WritingSequence]) -> float:
        """Return the seconds to wait for another tree before the next pass; 0 for none."""
        here = [sequence.client_drafts for sequence in ready if sequence.client_drafts is not None]
        if not here or len(here) < len(ready) or not self.fixed:
            return 0.0
        first = min(drafts.arrived for drafts in here)
        since = (first, max(first, self._ended))
        away = [sequence.client_drafts for sequence in absent if sequence.client_drafts is not None]
        ends = [longest_wait(*since, drafts.due, drafts.seconds, self.fixed) or 0.0 for drafts in away]
        return max(0.0, max(ends, default=0.0) - self.clock())


def longest_wait(first: float, possible: float, due: float | None, seconds: float | None, fixed: float) -> float | None:
    """Return until when a pass waits for a tree; None if it does not.

    Args:
        possible: when the pass could have begun: then, or at the end of the pass before.
        due: when the other one is expected; None if unknown.
        seconds: for which its client is away between a verdict and a tree; None if unknown.
        fixed: seconds of a pass over one row.
    """
    if due is None or seconds is None:
        return None
    latest = possible + NEAR_SHARE * fixed if seconds <= NEAR * fixed else first + SHARE * fixed
    return min(latest, due + SLACK * fixed) if due <= latest else None


@final
class PausedSequences:
    """Admission to the batch where some sequences wait for their clients. Mutated by the engine only."""

    def __init__(self, scheduler: Scheduler, allocator: SlotAllocator) -> None:
        self._scheduler, self._allocator = scheduler, allocator
        self.batcher = DraftBatcher()
        self.is_stalled = False
        """Whether the last step did nothing since all sequences wait; reset by everything that could change that."""

    @property
    def patience(self) -> float:
        """Seconds for which the next step should wait for trees that are on their way; 0 for none."""
        running = self._scheduler.running
        if self._scheduler.waiting:
            return 0.0
        absent = [sequence for sequence in running if sequence.is_paused]
        ready = [sequence for sequence in running if not sequence.is_paused]
        return self.batcher.patience(ready, absent) if absent else 0.0

    def give(self, sequence: WritingSequence, tree: TokenTree, *, arrived: float | None = None) -> None:
        """Give a sequence the tree of its next round, and queue it if it was parked; without effect on finished ones.

        Args:
            tree: may be empty; its depth leaves room for the bonus.
            arrived: when it arrived, on the clock of `batcher`; None for now.
        """
        assert sequence.client_drafts is not None, "the sequence takes trees"
        if sequence.is_finished:
            return
        sequence.client_drafts.put(tree, self.batcher.clock() if arrived is None else arrived)
        self._scheduler.unpark(sequence)
        self.is_stalled = False

    def park(self, sequence: WritingSequence) -> None:
        """Turn the slot of a waiting sequence into a cached prefix; without effect on others."""
        if sequence.is_paused and sequence in self._scheduler.running:
            self._allocator.leave(sequence, may_keep=True)
            self._scheduler.park(sequence)
            self.is_stalled = False

    def admit(self) -> bool:
        """Admit waiting sequences, parking paused ones while the first finds no room; returns whether any was."""
        scheduler = self._scheduler
        while not scheduler.admit(lambda new: self._allocator.fits([*scheduler.running, new])):
            paused = [sequence for sequence in scheduler.running if sequence.is_paused]
            if not (paused and scheduler.waiting):
                return False
            self.park(min(paused, key=lambda sequence: sequence.client_drafts.since if sequence.client_drafts else 0))
        return True

    def note_step(self, *, was_active: bool) -> None:
        """Note a step; `was_active` if it admitted, read, wrote or ended a sequence."""
        absent = [sequence for sequence in self._scheduler.running if sequence.is_paused]
        self.batcher.note_absent(absent)
        self.is_stalled = bool(self._scheduler.parked or absent) and not was_active
