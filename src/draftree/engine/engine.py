"""The engine: requests come in, rounds go by, texts come out.

Requests join and leave between rounds. Prompts are read in chunks beside the rounds of others. What a round raises is
retried sequence by sequence; only those that raise again fail.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from draftree.core.errors import InvalidRequestError
from draftree.core.types import RoundRecord
from draftree.engine.logprobs import scored_rows
from draftree.engine.memory import slot_budget
from draftree.engine.parts import Parts
from draftree.engine.prefill import PREFILL_TOKENS_BUSY, PREFILL_TOKENS_IDLE, split_prefill_budget
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.round import Chunk, run_round
from draftree.engine.scheduler import Scheduler
from draftree.engine.sequence import Piece, WritingSequence
from draftree.engine.slot_allocator import SlotAllocator

logger = logging.getLogger(__name__)

MAX_BATCH = 32
"""Sequences that are written at once at most, unless told otherwise."""
PENDING_TOKENS_IN_ROUND = 8
"""Pending tokens of a sequence that are read whatever else the pass reads."""
PREFIX_CACHE_SIZE = 8
"""Finished texts whose slots are kept at most, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a step brought for one sequence."""

    sequence: WritingSequence
    pieces: tuple[Piece, ...]
    is_last: bool = False
    """Whether nothing more will come."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine keeps to.

    Attributes:
        max_batch_size: sequences that are written at once at most; None for as many as memory allows, up to 32.
        max_waiting: sequences that may wait at most; None for any number.
        prefill_chunk_size: prompt tokens that a pass reads at most while texts are being written.
        prefix_cache_size: finished texts whose slots are kept at most, for prompts that begin as they do.
        memory: bytes that sequences may take; None for half of what is free when the engine is made.
    """

    max_batch_size: int | None = None
    max_waiting: int | None = None
    prefill_chunk_size: int = PREFILL_TOKENS_BUSY
    prefix_cache_size: int = PREFIX_CACHE_SIZE
    memory: int | None = None


class Engine:
    """Writes many sequences at once, each at its own pace. Not thread-safe.

    Args:
        parts: model, drafter, verifier and planner.
        limits: how many, how much.
        on_round: called with the record of every round.
        together: whether a round waits until all sequences of the batch have read their prompts.
        tries_again: whether a pass that raised is tried again, text by text, so that only those fail whose own pass
            raises; False raises at once.
    """

    def __init__(
        self,
        parts: Parts,
        limits: Limits | None = None,
        *,
        on_round: Callable[[RoundRecord], None] | None = None,
        together: bool = False,
        tries_again: bool = True,
    ) -> None:
        self._parts = parts
        self._limits = limits or Limits()
        self._budget = slot_budget(parts, self._limits.memory)
        self._scheduler = Scheduler(self._limits.max_batch_size or MAX_BATCH, self._limits.max_waiting)
        self._allocator = SlotAllocator(parts, self._budget, keep=self._limits.prefix_cache_size, shares=not together)
        # the model may outlive this engine: what is kept must not
        weakref.finalize(self, self._allocator.prefixes.clear).atexit = False
        self._on_round = on_round
        self._together = together
        self._tries_again = tries_again

    @property
    def parts(self) -> Parts:
        """What it works with."""
        return self._parts

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write."""
        return self._scheduler.is_idle

    @property
    def max_waiting(self) -> int | None:
        """Sequences that may wait at most; None for any number."""
        return self._scheduler.max_waiting

    @max_waiting.setter
    def max_waiting(self, count: int | None) -> None:
        self._scheduler.max_waiting = count

    def takes(self, count: int) -> bool:
        """Whether a request of so many sequences can be queued now."""
        return self._scheduler.takes(count)

    @property
    def running(self) -> Sequence[WritingSequence]:
        """Sequences in the batch, in the order of service."""
        return tuple(self._scheduler.running)

    @property
    def waiting(self) -> Sequence[WritingSequence]:
        """Sequences in the queue, in the order of service."""
        return tuple(self._scheduler.waiting)

    @property
    def longest(self) -> int:
        """Tokens that a text can have at most, the prompt included, for which there is memory."""
        longest, context = self._budget.longest, self._parts.target.max_length
        return context if longest is None else min(context, longest)

    def num_slots(self, length: int) -> int:
        """Slots of this many tokens, prompt and text, that fit into the memory for sequences."""
        return self._budget.num_slots(length)

    @property
    def prefix_stats(self) -> PrefixStats:
        """What was reused of earlier prompts and texts."""
        return self._allocator.stats

    def forget(self) -> None:
        """Let all kept slots go."""
        self._allocator.prefixes.clear()

    def add(self, *sequences: WritingSequence) -> None:
        """Queue the sequences of a request, all or none; they join the batch when there is room.

        Raises:
            InvalidRequestError: one of them will never fit into memory, is finished, or is here already.
            QueueFullError: as many wait as may.
        """
        here = {id(sequence) for sequence in (*self._scheduler.running, *self._scheduler.waiting)}
        for sequence in sequences:
            if sequence.is_finished or id(sequence) in here:
                state = "finished" if sequence.is_finished else "being written"
                raise InvalidRequestError(f"a sequence of {sequence.request_id} is {state} already: make another one")
            here.add(id(sequence))
            self._allocator.require_fit(sequence)
        self._scheduler.add(sequences)

    def abort(self, sequences: Sequence[WritingSequence]) -> None:
        """End these sequences now and free their slots; what is finished stays as it is."""
        for sequence in sequences:
            if not sequence.is_finished:
                sequence.abort()
        self._release()

    def stream(self, sequence: WritingSequence) -> Generator[Update, None, None]:
        """Write a sequence, beside whatever else is there, and yield its news; closing it aborts the sequence.

        Raises:
            DraftreeError: as `add` and `step`.
        """
        self.add(sequence)
        try:
            while True:
                pieces, is_last = sequence.take_pieces(), sequence.is_finished
                if pieces or is_last:
                    yield Update(sequence, pieces, is_last=is_last)
                if is_last:
                    return
                if not pieces:
                    self.step()
        finally:
            self.abort([sequence])

    def step(self) -> list[WritingSequence]:
        """One pass: a round for every sequence that has read its prompt, a chunk for some of the others.

        Returns:
            Those that got on, or ended; `take_pieces` gives their news.

        Raises:
            BaseException: a failure of no single sequence, such as a listener's or Ctrl-C; all running sequences are
                failed with it and their slots freed.
        """
        try:
            self._scheduler.admit(lambda sequence: self._allocator.fits([*self._scheduler.running, sequence]))
            self._make_room()
            self._allocator.open(self._scheduler.running)
            ready, chunks = self._share_pass()
            if ready or chunks:
                self._pass(ready, chunks)
        except BaseException as error:
            # also on Ctrl-C: slots must be consistent for the next user of the engine
            for sequence in self._scheduler.running:
                if not sequence.is_finished:
                    sequence.fail(error if isinstance(error, Exception) else RuntimeError("interrupted"))
            self._release()
            raise
        stepped = list(self._scheduler.running)
        self._release()
        return stepped

    def _make_room(self) -> None:
        """The youngest wait again if the others have grown into their memory; alone, each has room."""
        running = self._scheduler.running
        while len(running) > 1 and not self._allocator.fits(running, ahead=0):
            youngest = running[-1]
            self._allocator.leave(youngest, may_keep=False)
            self._scheduler.put_back(youngest)

    def _share_pass(self) -> tuple[list[WritingSequence], list[Chunk]]:
        """Sequences that decode in the next pass, and the prompt chunks of the others."""
        running = [s for s in self._scheduler.running if s.slot is not None and not s.is_finished]
        writing = [s for s in running if s.num_pending <= PENDING_TOKENS_IN_ROUND and not s.scores_prompt]
        reading = [s for s in running if s.num_pending > PENDING_TOKENS_IN_ROUND or s.scores_prompt]
        beside = any(s.counts.rounds for s in writing) and not self._together
        given = self._reading_sizes(reading, self._limits.prefill_chunk_size if beside else PREFILL_TOKENS_IDLE)
        chunks = [Chunk(s, count) for s, count in zip(reading, given, strict=True) if 0 < count < s.num_pending]
        ready = writing + [s for s, count in zip(reading, given, strict=True) if count == s.num_pending]
        if self._together and len(ready) < len(self._scheduler.running):
            return [], chunks
        return ready, chunks

    def _reading_sizes(self, reading: Sequence[WritingSequence], budget: int) -> list[int]:
        """How many tokens each reads; of scored prompts together no more rows than there is memory for logits."""
        rows = scored_rows(self._parts.target.vocab_size)
        # the root is no part of a scored chunk: a round reads it
        wanted = [min(s.num_pending - 1, rows) if s.scores_prompt else s.num_pending for s in reading]
        given = split_prefill_budget(wanted, budget)
        for place, sequence in enumerate(reading):
            if sequence.scores_prompt:
                given[place] = min(given[place], rows)
                rows -= given[place]
        return given

    def _pass(self, ready: Sequence[WritingSequence], chunks: Sequence[Chunk]) -> None:
        try:
            record = run_round(self._parts, ready, chunks)
        except AssertionError:
            raise  # a mistake of ours, not a request's
        except Exception as error:
            if not self._tries_again:
                raise
            self._try_each(ready, chunks, error)
            return
        if record is not None and self._on_round is not None:
            self._on_round(record)

    def _try_each(self, ready: Sequence[WritingSequence], chunks: Sequence[Chunk], error: Exception) -> None:
        """Retry each sequence of a pass that raised in a pass of its own; those that raise again fail."""
        jobs: list[tuple[WritingSequence, Sequence[Chunk]]] = [(s, ()) for s in ready]
        for chunk in chunks:
            # what the pass committed before it raised is read already; the last token is the root of a round
            left = min(chunk.num_tokens, chunk.sequence.num_pending - 1)
            jobs.append((chunk.sequence, (Chunk(chunk.sequence, left),)))
        logger.warning("a pass over %d texts raised %r", len(jobs), error)
        self._allocator.recover([sequence for sequence, _ in jobs])
        for sequence, own in jobs:
            if sequence.is_finished or not all(chunk.num_tokens for chunk in own):
                continue
            try:
                record = run_round(self._parts, () if own else (sequence,), own)
            except AssertionError:
                raise
            except Exception as its_own:
                sequence.fail(its_own)
                continue
            if record is not None and self._on_round is not None:
                self._on_round(record)

    def _release(self) -> None:
        for sequence in self._scheduler.drop_finished():
            self._allocator.leave(sequence, may_keep=sequence.error is None)

    def check_integrity(self) -> None:
        """Raise AssertionError if the books of requests, slots and kept prefixes do not agree; between steps only."""
        self._scheduler.check_integrity()
        self._allocator.check_integrity(self._scheduler.running, self._scheduler.waiting)
        self._parts.target.check_integrity()
