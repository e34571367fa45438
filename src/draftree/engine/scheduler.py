"""Who is in the batch: first come, first served, as many at once as there is room for."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from draftree.core.errors import QueueFullError
from draftree.engine.sequence import WritingSequence


class Scheduler:
    """Waiting and running sequences, both in the order of service. Mutated by the engine only.

    Sequences of a lower `priority` number go first, those of one number in the order in which they came. Nobody is
    passed by a later one because that one is smaller: small ones would starve large ones.

    Args:
        max_batch_size: sequences that are written at once at most.
        max_waiting: sequences that may wait at most; None for any number.
    """

    def __init__(self, max_batch_size: int, max_waiting: int | None = None) -> None:
        self.max_batch_size = max_batch_size
        self.max_waiting = max_waiting
        self.waiting: list[WritingSequence] = []
        self.running: list[WritingSequence] = []
        self._num_added = 0

    def takes(self, count: int) -> bool:
        """Whether so many can be queued together; if the queue is empty, any number can."""
        if self.max_waiting is None or not self.waiting:
            return True
        # those that will run at the next step do not count as waiting
        free = max(0, self.max_batch_size - len(self.running))
        return len(self.waiting) + count <= self.max_waiting + free

    def add(self, sequences: Sequence[WritingSequence]) -> None:
        """Queue the sequences of a request, all or none.

        Raises:
            QueueFullError: there is no room for them.
        """
        if not self.takes(len(sequences)):
            raise QueueFullError(
                f"{len(sequences)} texts were to be queued, but {len(self.waiting)} wait already and "
                f"{self.max_waiting} may: try again later, or allow more by max_waiting"
            )
        for sequence in sequences:
            sequence.rank = (sequence.priority, self._num_added)
            self._num_added += 1
            bisect.insort(self.waiting, sequence, key=_rank)

    def admit(self, fits: Callable[[WritingSequence], bool]) -> list[WritingSequence]:
        """Move waiting sequences into the batch while there is room; returns them."""
        admitted = []
        while self.waiting and len(self.running) < self.max_batch_size and fits(self.waiting[0]):
            sequence = self.waiting.pop(0)
            bisect.insort(self.running, sequence, key=_rank)
            admitted.append(sequence)
        return admitted

    def put_back(self, sequence: WritingSequence) -> None:
        """Let a running sequence wait again, where it was in the order."""
        self.running.remove(sequence)
        bisect.insort(self.waiting, sequence, key=_rank)

    def drop_finished(self) -> list[WritingSequence]:
        """Take finished sequences out of the batch and the queue; returns them."""
        finished = [s for s in (*self.running, *self.waiting) if s.is_finished]
        if finished:
            self.running = [s for s in self.running if not s.is_finished]
            self.waiting = [s for s in self.waiting if not s.is_finished]
        return finished

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write."""
        return not self.running and not self.waiting

    def check_integrity(self) -> None:
        """Raise AssertionError if sequences are lost, twice there, or out of order."""
        everything = [*self.running, *self.waiting]
        assert len({id(s) for s in everything}) == len(everything), "a sequence waits or runs, once"
        assert not any(s.is_finished for s in everything), "who is finished is gone"
        assert len(self.running) <= self.max_batch_size, "the batch is bounded"
        for queue in (self.running, self.waiting):
            assert [s.rank for s in queue] == sorted(s.rank for s in queue), "first come, first served"


def _rank(sequence: WritingSequence) -> tuple[int, int]:
    return sequence.rank
