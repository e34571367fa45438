"""Trees that come from a client: a sequence with them takes part in one round for each, and waits in between.

A waiting sequence keeps its slot. If another sequence needs the room, the one that has waited longest is parked: its
slot becomes a cached prefix, and the sequence is queued again when its next tree arrives.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, final

from draftree.core.tree import EMPTY, TokenTree
from draftree.engine.gathering import Absence, Gathering

if TYPE_CHECKING:
    from draftree.engine.scheduler import Scheduler
    from draftree.engine.sequence import WritingSequence
    from draftree.engine.slot_allocator import SlotAllocator

_TURNS = itertools.count()


@final
class GivenTrees:
    """The trees of one sequence, one at a time. Mutated on the engine's thread only."""

    def __init__(self) -> None:
        self._tree: TokenTree | None = None
        self.since = next(_TURNS)
        """Grows with every round of any such sequence; the smallest has waited longest."""
        self.absence = Absence()

    @property
    def is_waiting(self) -> bool:
        """Whether the next tree has not arrived."""
        return self._tree is None

    def put(self, tree: TokenTree) -> None:
        """Set the tree of the next round."""
        self._tree = tree

    def take(self) -> TokenTree:
        """Return the tree, and wait for the next one; an empty tree if none has arrived."""
        tree, self._tree = self._tree, None
        self.since, self.absence.has_taken = next(_TURNS), True
        return EMPTY if tree is None else tree


def is_held(sequence: WritingSequence) -> bool:
    """Return whether a sequence waits for a tree of its client."""
    return sequence.given is not None and sequence.given.is_waiting


@final
class HeldSequences:
    """Admission to the batch where some sequences wait for their clients. Mutated by the engine only.

    Args:
        scheduler: of the engine.
        allocator: of the engine.
    """

    def __init__(self, scheduler: Scheduler, allocator: SlotAllocator) -> None:
        self._scheduler, self._allocator = scheduler, allocator
        self.gathering = Gathering()
        self.is_stalled = False
        """Whether the last step did nothing since all sequences wait; reset by everything that could change that."""

    @property
    def patience(self) -> float:
        """Seconds for which the next step should wait for trees that are on their way; 0 for none."""
        running = self._scheduler.running
        if self._scheduler.waiting:
            return 0.0
        absent = [sequence for sequence in running if is_held(sequence)]
        return self.gathering.patience([one for one in running if not is_held(one)], absent) if absent else 0.0

    def give(self, sequence: WritingSequence, tree: TokenTree, *, arrived: float | None = None) -> None:
        """Give a sequence the tree of its next round, and queue it if it was parked; without effect on finished ones.

        Args:
            sequence: one with `given`.
            tree: may be empty; its depth leaves room for the bonus.
            arrived: when it arrived, on the clock of `gathering`; None for now.
        """
        assert sequence.given is not None, "the sequence takes trees"
        if sequence.is_finished:
            return
        sequence.given.put(tree)
        self.gathering.note_tree(sequence.given.absence, self.gathering.clock() if arrived is None else arrived)
        self._scheduler.unpark(sequence)
        self.is_stalled = False

    def park(self, sequence: WritingSequence) -> None:
        """Turn the slot of a waiting sequence into a cached prefix; without effect on others."""
        if is_held(sequence) and sequence in self._scheduler.running:
            self._allocator.leave(sequence, may_keep=True)
            self._scheduler.park(sequence)
            self.is_stalled = False

    def admit(self) -> bool:
        """Admit waiting sequences, and park held ones while the first still finds no room; returns whether any was."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        has_admitted = bool(self._admitted())
        while not has_admitted and waiting:
            held = [sequence for sequence in running if is_held(sequence)]
            if not held:
                break
            self.park(min(held, key=lambda sequence: sequence.given.since if sequence.given else 0))
            running = self._scheduler.running
            has_admitted = bool(self._admitted())
        return has_admitted

    def _admitted(self) -> list[WritingSequence]:
        return self._scheduler.admit(lambda new: self._allocator.fits([*self._scheduler.running, new]))

    def note_step(self, *, was_active: bool) -> None:
        """Note a step; `was_active` if it admitted, read, wrote or ended a sequence."""
        absent = [sequence for sequence in self._scheduler.running if is_held(sequence)]
        self.gathering.note_absent(absent)
        waits = bool(self._scheduler.parked or absent)
        self.is_stalled = waits and not was_active
