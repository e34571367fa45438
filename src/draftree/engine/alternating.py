"""Alternating batches: the drafter drafts for one half of the batch while the target verifies the other half.

A half is not written to while it waits, so its drafts are made for the text that is verified next: nothing is guessed.
The drafter must not use the target's memory or thread, such as a model in a process of its own. Texts do not depend on
the halves: a pick is a function of logits, seed, position and token.

It pays where a pass over half of the rows takes less time than a whole one. With t(n) seconds of a pass and d(n) of a
draft for n sequences, 2 max(t(n/2), d(n/2)) must be less than t(n) + d(n).

Source: MineDraft, arXiv 2603.18016.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

from draftree.core.types import RoundRecord
from draftree.engine.parts import EngineParts
from draftree.engine.round import Chunk, DraftedRound, draft_round, finish_round, run_round
from draftree.engine.sequence import WritingSequence
from draftree.engine.two_ways import TwoWays


@dataclass(frozen=True, slots=True)
class Half:
    """Sequences for which a thread has drafted, as they were then.

    Attributes:
        sequences: the sequences.
        marks: draft state and length of the text of each.
        side: which of the two planners planned them.
        drafts: their drafts, or the error of drafting.
    """

    sequences: tuple[WritingSequence, ...]
    marks: tuple[tuple[Any, int], ...]
    side: int
    drafts: Future[DraftedRound]

    def fits(self, ready: Sequence[WritingSequence]) -> bool:
        """Whether all of them can take part in a pass and nothing changed since."""
        here = {id(sequence) for sequence in ready}
        return all(
            id(sequence) in here and sequence.draft_state is state and len(sequence.history) == length
            for sequence, (state, length) in zip(self.sequences, self.marks, strict=True)
        )


@final
class Alternation:
    """Runs the passes of an engine with alternating halves. Not thread-safe.

    Args:
        parts: parts of the engine; each half has a copy of their planner.
        ways: chooses between halves and whole batches by measured speed; None to alternate always.
    """

    def __init__(self, parts: EngineParts, ways: TwoWays | None = None) -> None:
        self._parts, self._ways = parts, ways
        self._sides = tuple(replace(parts, planner=copy.deepcopy(parts.planner)) for _ in range(2))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="draftree-alternating")
        self._drafted: Half | None = None
        self.num_alternated = 0
        """Passes beside which another half was drafted."""

    @property
    def note(self) -> str:
        """Message for the user about what was measured; empty before that."""
        return "" if self._ways is None else self._ways.note

    def drop(self) -> None:
        """Forget the drafts that were made for a half; between passes."""
        self._drafted = None

    def run(self, ready: Sequence[WritingSequence], chunks: Sequence[Chunk]) -> RoundRecord | None:
        """Run one pass: the half that was drafted, or sequences of which no half can be made; arguments as `run_round`.

        Raises:
            Exception: as `run_round`; the drafts are dropped.
        """
        half, self._drafted = self._drafted, None
        if any(sequence.given is not None for sequence in ready):  # their clients draft
            return run_round(self._parts, ready, chunks)
        new = [sequence for sequence in ready if not sequence.counts.rounds]
        if new or not ready:  # the pass in which a prompt ends is for its sequence alone
            self._drafted = half
            return run_round(self._parts, new, chunks)
        if len(ready) < 2 or (self._ways is not None and not self._ways.is_second(len(ready))):
            return self._timed(run_round(self._parts, ready, chunks), len(ready), chunks)
        if half is None or not half.fits(ready) or _is_uneven(len(half.sequences), len(ready)):
            middle = -(-len(ready) // 2)
            side, rest = 0, ready[middle:]
            drafted = draft_round(self._sides[side], ready[:middle])
        else:
            now = {id(sequence) for sequence in half.sequences}
            side, rest = half.side, [sequence for sequence in ready if id(sequence) not in now]
            drafted = half.drafts.result()
        record = finish_round(self._sides[side], drafted, chunks, beside=self._drafting(rest, 1 - side))
        self.num_alternated += 1
        return self._timed(record, len(ready), chunks)

    @contextmanager
    def _drafting(self, rest: Sequence[WritingSequence], side: int) -> Iterator[None]:
        """Draft for the other half in the thread; nothing else uses the drafter inside the block."""
        parts = self._sides[side]
        job = self._pool.submit(draft_round, parts, rest)
        try:
            yield
        except BaseException:
            wait([job])
            raise
        start = parts.clock()
        wait([job])
        if job.exception() is None:
            job.result().wait_was(parts.clock() - start)
        marks = tuple((s.draft_state, len(s.history)) for s in rest)
        self._drafted = Half(tuple(rest), marks, side, job)

    def _timed(self, record: RoundRecord | None, count: int, chunks: Sequence[Chunk]) -> RoundRecord | None:
        if self._ways is not None and record is not None and not chunks:
            self._ways.note_round(count, record.total_seconds, sum(row.num_written for row in record.sequences))
        return record


def alternation_of(parts: EngineParts) -> Alternation | None:
    """Return the alternation of an engine whose drafter alternates, chosen by speed; None for other drafters."""
    return Alternation(parts, TwoWays("whole batches", "alternating batches")) if parts.traits.alternates else None


def _is_uneven(half: int, whole: int) -> bool:
    """Whether one half has more than twice the sequences of the other; one of three is not."""
    small, large = sorted((half, whole - half))
    return large > 2 * small
