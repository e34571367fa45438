"""The engine: continuous batching of requests by rounds of speculative decoding.

Requests join and leave between rounds. Prompts are prefilled in chunks, together with the rounds of decoding sequences.
If a batch raises, each sequence is retried alone; only those that raise again fail.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Sequence

from draftree.core.errors import GenerationError, InvalidRequestError, RankError
from draftree.core.types import RoundRecord
from draftree.drafters.base import DraftTraits
from draftree.engine.client_drafts import PausedSequences
from draftree.engine.memory import SlotAllocator, divided, slot_budget
from draftree.engine.parts import EngineParts
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.round import Chunk, run_round
from draftree.engine.scheduler import Scheduler, prefill_budget, reading_sizes
from draftree.engine.sequence import Update, WritingSequence, slot_of
from draftree.options import EngineLimits

logger = logging.getLogger(__name__)

MAX_BATCH = 32  # default maximum number of running sequences
PENDING_TOKENS_IN_ROUND = 8  # pending tokens that a sequence may always read, besides the prefill budget


class Engine:
    """Generates many sequences concurrently, each at its own pace.

    Several threads may add, step, stream and abort: a step of any of them advances the sequences of all.

    Args:
        together: whether decoding waits until all sequences of the batch are prefilled.
        tries_again: whether sequences of a failed pass are retried one by one; False raises immediately.
    """

    def __init__(
        self,
        parts: EngineParts,
        limits: EngineLimits | None = None,
        *,
        on_round: Callable[[RoundRecord], None] | None = None,
        together: bool = False,
        tries_again: bool = True,
    ) -> None:
        self.parts = parts
        self.lock = parts.target.lock  # lock of the model; unfinished sequences are read under it
        self._limits = limits or EngineLimits()
        most = self._limits.max_batch_size or MAX_BATCH
        self._scheduler = Scheduler(min(most, parts.target.max_open or most), self._limits.max_waiting)
        budget = slot_budget(parts, self._limits.sequence_memory)
        self._allocator = SlotAllocator(parts, budget, keep=self._limits.prefix_cache_size, shares=not together)
        self.paused = PausedSequences(self._scheduler, self._allocator)  # sequences whose trees come from clients
        # the model may outlive this engine: what is kept must not
        weakref.finalize(self, self.lock.later, self._allocator.prefixes.clear).atexit = False
        self._listeners = [] if on_round is None else [on_round]
        self._traits = self._all_traits()
        self._together = together
        self._tries_again = tries_again

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    @property
    def has_work(self) -> bool:
        """Whether a step can advance a sequence: there is one, and not all wait for trees of their clients."""
        return not (self._scheduler.is_idle or self.paused.is_stalled)

    @property
    def max_waiting(self) -> int | None:
        """Maximum number of waiting sequences; None for no limit."""
        return self._scheduler.max_waiting

    @max_waiting.setter
    def max_waiting(self, count: int | None) -> None:
        self._scheduler.max_waiting = count

    def on_round(self, callback: Callable[[RoundRecord], None]) -> Callable[[], None]:
        """Add a listener of the record of every round, from any thread; returns a function that removes it."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def takes(self, count: int) -> bool:
        """Return whether a request of `count` sequences can be queued now."""
        return self._scheduler.takes(count)

    @property
    def running(self) -> Sequence[WritingSequence]:
        """Sequences in the batch, in the order of service."""
        return tuple(self._scheduler.running)

    @property
    def waiting(self) -> Sequence[WritingSequence]:
        """Sequences in the queue, in the order of service, and parked ones."""
        return (*self._scheduler.waiting, *self._scheduler.parked)

    @property
    def longest(self) -> int:
        """Tokens that a text can have at most, the prompt included, for which there is memory."""
        context = self.parts.target.max_length
        return context if self.slot_room is None else min(context, self.slot_room)

    @property
    def slot_room(self) -> int | None:
        """Tokens for which one slot has memory, those of a source included; None if tokens take no memory."""
        return self._allocator.budget.longest

    @property
    def max_nodes(self) -> int:
        """Drafted tokens of one sequence for which there is memory."""
        return self._allocator.budget.max_nodes

    def num_slots(self, length: int) -> int:
        """Slots of this many tokens, prompt and text, that fit into the memory for sequences."""
        return self._allocator.budget.num_slots(length)

    @property
    def prefill_chunk_size(self) -> int:
        """Maximum prompt tokens per pass while any sequence is decoding."""
        return self._limits.prefill_chunk_size

    @property
    def prefix_stats(self) -> PrefixStats:
        """Prompt tokens that were reused from cached prefixes."""
        return self._allocator.stats

    def forget(self) -> None:
        self.lock.between(self._allocator.prefixes.clear)

    def add(self, *sequences: WritingSequence) -> None:
        """Queue the sequences of a request, all or none; they join the batch when there is room."""
        self.lock.between(lambda: self._add(sequences))

    def _add(self, sequences: Sequence[WritingSequence]) -> None:
        here = {id(sequence) for sequence in (*self._scheduler.running, *self.waiting)}
        for sequence in sequences:
            if sequence.is_finished or id(sequence) in here:
                state = "finished" if sequence.is_finished else "being written"
                raise InvalidRequestError(f"a sequence of {sequence.request_id} is {state} already: create a new one")
            here.add(id(sequence))
            self._allocator.require_fit(sequence)
        self._scheduler.add(sequences)
        self.paused.is_stalled = False

    def abort(self, sequences: Sequence[WritingSequence]) -> None:
        """End these sequences now and free their slots; finished ones are unchanged."""
        self.lock.between(lambda: self._abort(sequences))

    def _abort(self, sequences: Sequence[WritingSequence]) -> None:
        for sequence in sequences:
            if not sequence.is_finished:
                sequence.abort()
        self.paused.is_stalled = False
        self._release()

    def stream(self, sequence: WritingSequence) -> Generator[Update, None, None]:
        """Run a sequence together with all others, and yield its updates; closing the generator aborts the sequence."""
        self.add(sequence)
        try:
            while True:
                update = self.lock.between(sequence.take_update)
                if update is None:
                    self.step()
                    continue
                yield update
                if update.is_last:
                    return
        finally:
            # not `abort`: an abandoned generator is closed by whatever thread collects it, even within a step
            self.lock.later(lambda: self._abort([sequence]))

    def step(self) -> list[WritingSequence]:
        """Run one pass: a round for every prefilled sequence, and prompt chunks of others.

        A failure that no sequence caused, such as a callback's or Ctrl-C, ends all running sequences, and is raised.

        Returns:
            The sequences that advanced or ended; `take_update` returns their new output.
        """
        return self.lock.run(self._step)

    def _step(self) -> list[WritingSequence]:
        try:
            has_admitted = self.paused.admit()
            self._make_room()
            self._allocator.open(self._scheduler.running)
            ready, chunks = self._share_pass()
            if ready or chunks:
                self._pass(ready, chunks)
        except BaseException as error:
            # also on Ctrl-C: slots must be consistent for the next user of the engine
            interrupted = GenerationError(f"{type(error).__name__} interrupted the batch: run the request again")
            for sequence in self._scheduler.running:
                if not sequence.is_finished:
                    sequence.fail(error if isinstance(error, Exception) else interrupted)
            self._release()
            raise
        stepped = list(self._scheduler.running)
        self.paused.note_step(was_active=bool(has_admitted or ready or chunks or any(s.is_finished for s in stepped)))
        self._release()
        return stepped

    def _make_room(self) -> None:
        """Preempt the youngest sequences if the others have grown into their memory; a single one always has room."""
        running = self._scheduler.running
        while len(running) > 1 and not self._allocator.fits(running, ahead=0):
            youngest = running[-1]
            self._allocator.leave(youngest, may_keep=False)
            self._scheduler.put_back(youngest)

    def _share_pass(self) -> tuple[list[WritingSequence], list[Chunk]]:
        """Return the sequences that decode in the next pass, and the prompt chunks of the others."""
        running = [s for s in self._scheduler.running if s.slot is not None and not s.is_finished]
        reading = [s for s in running if s.num_pending > PENDING_TOKENS_IN_ROUND or s.scores_prompt]
        writing = [s for s in running if s not in reading and not s.is_paused]
        num_decoding = 0 if self._together else sum(s.counts.rounds > 0 for s in writing)
        budget = prefill_budget(len(reading), num_decoding, self._limits.prefill_chunk_size)
        sizes = reading_sizes(reading, budget, vocab_size=self.parts.target.vocab_size)
        ends = map(self._allocator.chunk_end, reading)
        sizes = [min(count, end - slot_of(s).length) for s, count, end in zip(reading, sizes, ends, strict=True)]
        chunks = [Chunk(s, count) for s, count in zip(reading, sizes, strict=True) if 0 < count < s.num_pending]
        ready = writing + [s for s, count in zip(reading, sizes, strict=True) if count == s.num_pending]
        if self._together and len(ready) < len(self._scheduler.running):
            return [], chunks
        return ready, chunks

    def _pass(self, ready: Sequence[WritingSequence], chunks: Sequence[Chunk]) -> None:
        try:
            records = self._round(ready, chunks)
        except (AssertionError, RankError):
            raise  # an internal error, not a request's, or the end of the model
        except Exception as error:
            if not self._tries_again:
                raise
            self._try_each(ready, chunks, error)
            return
        self._notify(records)

    def _round(self, ready: Sequence[WritingSequence], chunks: Sequence[Chunk]) -> list[RoundRecord]:
        return run_round(self.parts, ready, chunks, max_nodes=self._allocator.budget.max_nodes)

    def _notify(self, records: Sequence[RoundRecord]) -> None:
        for record in records:
            for listener in tuple(self._listeners):
                listener(record)
        if self._traits != (traits := self._all_traits()):  # a merged drafter was released
            self._traits = traits
            before = self._allocator.budget
            self._allocator.budget = divided(self.parts, before.sequence_bytes, before.free_bytes)

    def _all_traits(self) -> list[DraftTraits]:
        return [choice.traits for choice in self.parts.drafters]

    def _try_each(self, ready: Sequence[WritingSequence], chunks: Sequence[Chunk], error: Exception) -> None:
        """Retry each sequence of a failed pass alone; those that raise again fail."""
        jobs: list[tuple[WritingSequence, Sequence[Chunk]]] = [(s, ()) for s in ready]
        for chunk in chunks:
            # tokens committed before the failure are read already; the last token is the root of a round
            left = min(chunk.num_tokens, chunk.sequence.num_pending - 1)
            jobs.append((chunk.sequence, (Chunk(chunk.sequence, left),)))
        logger.warning("a pass over %d sequences raised %r", len(jobs), error)
        self._allocator.recover([sequence for sequence, _ in jobs])
        for sequence, prompt_chunks in jobs:
            if sequence.is_finished or not all(chunk.num_tokens for chunk in prompt_chunks):
                continue
            try:
                records = self._round(() if prompt_chunks else (sequence,), prompt_chunks)
            except (AssertionError, RankError):
                raise
            except Exception as repeated:
                sequence.fail(repeated)
                continue
            self._notify(records)

    def _release(self) -> None:
        for sequence in self._scheduler.drop_finished():
            self._allocator.leave(sequence, may_keep=sequence.error is None)

    def check_integrity(self) -> None:
        """Raise AssertionError if requests, slots and cached prefixes are inconsistent; call between steps."""
        self._scheduler.check_integrity()
        self._allocator.check_integrity(self._scheduler.running, self.waiting)
        self.parts.target.check_integrity()
