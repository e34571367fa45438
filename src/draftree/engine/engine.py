"""The engine: requests come in, rounds go by, texts come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draftree.core.types import MAX_NODES, RoundRecord
from draftree.engine.parts import Parts
from draftree.engine.round import PREFILL_ROWS, prefill, run_round
from draftree.engine.scheduler import Scheduler
from draftree.engine.sequence import Piece, WritingSequence

DRAFT_ROOM = 64
"""Tentative tokens for which slots have room from the start; more if the drafter's trees are larger."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a step brought for one sequence."""

    sequence: WritingSequence
    pieces: tuple[Piece, ...]

    @property
    def is_last(self) -> bool:
        """Whether the sequence is finished."""
        return self.sequence.is_finished


class Engine:
    """Writes many sequences at once, each at its own pace. Not thread-safe.

    Args:
        parts: model, drafter, verifier and planner.
        max_batch_size: sequences that are written at once at most.
        on_round: called with the record of every round.
        together: whether a round waits until all sequences of the batch have read their prompts.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        max_batch_size: int,
        on_round: Callable[[RoundRecord], None] | None = None,
        together: bool = False,
    ) -> None:
        self._parts = parts
        self._scheduler = Scheduler(max_batch_size)
        self._on_round = on_round
        self._together = together

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write."""
        return self._scheduler.is_idle

    def add(self, sequence: WritingSequence) -> None:
        """Queue a sequence; it joins the batch when a slot is free."""
        self._scheduler.add(sequence)

    def abort(self, sequences: Sequence[WritingSequence]) -> None:
        """End these sequences now and free their slots."""
        for sequence in sequences:
            if not sequence.is_finished:
                sequence.abort()
        self._release()

    def step(self) -> list[Update]:
        """One round for every sequence that has read its prompt, one chunk for the others.

        Raises:
            Exception: whatever a part raised; all running sequences are failed with it and their slots freed.
        """
        try:
            self._open(self._scheduler.admit())
            prefill(self._parts, self._scheduler.running)
            running = self._scheduler.running
            ready = [s for s in running if s.num_pending <= PREFILL_ROWS]
            if ready and not (self._together and len(ready) < len(running)):
                record = run_round(self._parts, ready)
                if self._on_round is not None:
                    self._on_round(record)
        except BaseException as error:
            # also on Ctrl-C: slots must be whole for whoever uses the engine next
            for sequence in self._scheduler.running:
                sequence.fail(error if isinstance(error, Exception) else RuntimeError("interrupted"))
            self._release()
            raise
        stepped = list(running)
        self._release()
        updates = [Update(s, s.take_pieces()) for s in stepped]
        return [update for update in updates if update.pieces or update.is_last]

    def _open(self, admitted: Sequence[WritingSequence]) -> None:
        if not admitted:
            return
        parts = self._parts
        tree = max(DRAFT_ROOM, min(parts.planner.default_nodes, MAX_NODES))
        count, length = len(self._scheduler.running), max(s.limit for s in admitted) + tree
        parts.target.reserve(count, length)
        if parts.drafter is not None:
            parts.drafter.reserve(count, length)
        for sequence in admitted:
            sequence.slot = parts.target.open()
            sequence.plan_state = parts.planner.open()
            if parts.drafter is not None:
                sequence.draft_state = parts.drafter.open(replace(sequence.view, slot=sequence.slot))

    def _release(self) -> None:
        for sequence in self._scheduler.drop_finished():
            if sequence.slot is not None:
                self._parts.target.close(sequence.slot)
                sequence.slot = None
            if sequence.draft_state is not None and self._parts.drafter is not None:
                self._parts.drafter.close(sequence.draft_state)
                sequence.draft_state = None
