"""The scheduler: admission to the batch, first come, first served within a priority, and prefill budgets."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from draftree.core.errors import QueueFullError
from draftree.engine.round import scored_rows
from draftree.engine.sequence import WritingSequence

RANK = attrgetter("rank")
PREFILL_TOKENS_IDLE = 512  # prompt tokens per pass while no sequence is decoding


def prefill_budget(num_reading: int, num_decoding: int, chunk_size: int) -> int:
    """Return how many prompt tokens a pass may read.

    While more sequences wait for their first token than decode, they get a chunk each, as far as an idle engine would
    read: a pass over many rows costs less per row, so all of them wait for less time.

    Args:
        num_reading: sequences with unread prompt tokens.
        num_decoding: sequences that have written tokens and wait for the next one.
        chunk_size: prompt tokens per pass while others decode.
    """
    if not num_decoding:
        return PREFILL_TOKENS_IDLE
    chunks = num_reading if num_reading > num_decoding else 1
    return max(chunk_size, min(chunks * chunk_size, PREFILL_TOKENS_IDLE))


def split_prefill_budget(pending: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens each sequence may prefill, at most its unread ones.

    The oldest prompt gets half of the budget, so that a long prompt always makes progress; the rest goes to the prompts
    with the fewest unread tokens, so that a long prompt does not delay short ones.

    Args:
        pending: unread tokens per sequence, in the order of service.
        budget: total tokens, at least 1.
    """
    if not pending:
        return []
    sizes = [min(pending[0], -(-budget // 2)), *[0] * (len(pending) - 1)]
    left = budget - sizes[0]
    for place in sorted(range(1, len(pending)), key=pending.__getitem__):
        sizes[place] = min(pending[place], left)
        left -= sizes[place]
    sizes[0] += min(pending[0] - sizes[0], left)
    return sizes


def reading_sizes(reading: Sequence[WritingSequence], budget: int, *, vocab_size: int) -> list[int]:
    """Return how many tokens each sequence prefills; scored prompts are limited by the memory for logits.

    Args:
        reading: sequences with unread tokens, in the order of service.
    """
    rows = scored_rows(vocab_size)
    # the root is not part of a scored chunk, nor read before the client's tree: a round reads it
    wanted = [
        min(sequence.num_pending - 1, rows) if sequence.scores_prompt else sequence.num_pending - sequence.is_paused
        for sequence in reading
    ]
    sizes = split_prefill_budget(wanted, budget)
    for place, sequence in enumerate(reading):
        if sequence.scores_prompt:
            sizes[place] = min(sizes[place], rows)
            rows -= sizes[place]
    return sizes


@dataclass(eq=False)
class Scheduler:
    """Waiting and running sequences, both in the order of service. Mutated by the engine only.

    Sequences with a lower `priority` number go first, those of equal priority in order of arrival. A sequence is never
    overtaken because a later one is smaller: small sequences would starve large ones.
    """

    max_batch_size: int
    max_waiting: int | None = None  # maximum number of waiting sequences; None for no limit
    waiting: list[WritingSequence] = field(default_factory=list)
    running: list[WritingSequence] = field(default_factory=list)
    parked: list[WritingSequence] = field(default_factory=list)  # left the batch until their client sends a tree
    _num_added: int = 0

    def takes(self, count: int) -> bool:
        """Return whether `count` sequences can be queued together; an empty queue takes any number."""
        if self.max_waiting is None or not self.waiting:
            return True
        # sequences that will run at the next step do not count as waiting
        free = max(0, self.max_batch_size - len(self.running))
        return len(self.waiting) + count <= self.max_waiting + free

    def add(self, sequences: Sequence[WritingSequence]) -> None:
        """Queue the sequences of a request, all or none."""
        if not self.takes(len(sequences)):
            raise QueueFullError(
                f"{len(sequences)} sequences cannot be queued: {len(self.waiting)} are waiting and max_waiting is "
                f"{self.max_waiting}; try again later, or raise max_waiting"
            )
        for sequence in sequences:
            sequence.rank = (sequence.priority, self._num_added)
            self._num_added += 1
            bisect.insort(self.waiting, sequence, key=RANK)

    def admit(self, fits: Callable[[WritingSequence], bool]) -> list[WritingSequence]:
        """Move waiting sequences into the batch while there is room; returns the admitted ones."""
        admitted = []
        while self.waiting and len(self.running) < self.max_batch_size and fits(self.waiting[0]):
            sequence = self.waiting.pop(0)
            bisect.insort(self.running, sequence, key=RANK)
            admitted.append(sequence)
        return admitted

    def put_back(self, sequence: WritingSequence) -> None:
        """Move a running sequence back to its place in the queue."""
        self.running.remove(sequence)
        bisect.insort(self.waiting, sequence, key=RANK)

    def park(self, sequence: WritingSequence) -> None:
        """Take a running sequence out of the batch and out of the queue."""
        self.running.remove(sequence)
        self.parked.append(sequence)

    def unpark(self, sequence: WritingSequence) -> None:
        """Return a parked sequence to its place in the queue; without effect on others."""
        if sequence in self.parked:
            self.parked.remove(sequence)
            bisect.insort(self.waiting, sequence, key=RANK)

    def drop_finished(self) -> list[WritingSequence]:
        """Remove finished sequences from the batch, the queue and the parked ones; returns them."""
        finished = [s for s in (*self.running, *self.waiting, *self.parked) if s.is_finished]
        if finished:
            kept = ([s for s in queue if not s.is_finished] for queue in (self.running, self.waiting, self.parked))
            self.running, self.waiting, self.parked = kept
        return finished

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting and not self.parked

    def check_integrity(self) -> None:
        """Raise AssertionError if sequences are lost, duplicated, or out of order."""
        everything = [*self.running, *self.waiting, *self.parked]
        assert len({id(s) for s in everything}) == len(everything), "a sequence is waiting, running or parked, once"
        assert not any(s.is_finished for s in everything), "finished sequences are removed"
        assert len(self.running) <= self.max_batch_size, "the batch is bounded"
        for queue in (self.running, self.waiting):
            assert [s.rank for s in queue] == sorted(s.rank for s in queue), "sequences are in the order of service"
