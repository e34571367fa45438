"""Who is in the batch: first come, first served, as many at once as there are slots."""

from __future__ import annotations

from collections import deque

from draftree.engine.sequence import WritingSequence


class Scheduler:
    """Waiting and running sequences. Mutated by the engine only.

    Args:
        max_batch_size: sequences that are written at once at most.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.waiting: deque[WritingSequence] = deque()
        self.running: list[WritingSequence] = []

    def add(self, sequence: WritingSequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def admit(self) -> list[WritingSequence]:
        """Move waiting sequences into the batch while there is room; returns them."""
        admitted = []
        while self.waiting and len(self.running) < self.max_batch_size:
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def drop_finished(self) -> list[WritingSequence]:
        """Take finished sequences out of the batch and the queue; returns them."""
        finished = [s for s in (*self.running, *self.waiting) if s.is_finished]
        self.running = [s for s in self.running if not s.is_finished]
        self.waiting = deque(s for s in self.waiting if not s.is_finished)
        return finished

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write."""
        return not self.running and not self.waiting
