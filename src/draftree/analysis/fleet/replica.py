"""One simulated engine: its sequences, the rows of its next step, and whether the step waits for a tree. No torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from draftree.analysis.fleet.host import Host
from draftree.analysis.fleet.workload import RoundOutcome, SimulatedRequest
from draftree.engine.gathering import longest_wait
from draftree.engine.prefill import PREFILL_TOKENS_IDLE, split_prefill_budget

__all__ = ["Replica", "Running", "Step"]


@dataclass(slots=True, eq=False)
class Running:
    """A request in a replica. Mutated by `Fleet`.

    Attributes:
        request: the request.
        unread: tokens of its prompt that are not read yet.
        written: tokens of the text.
        rounds: rounds so far.
        first: when its first tokens were there, for its client.
        end: when its last tokens were there.
        has_first: whether `first` is known.
        queued: whether it waited for a place in the batch.
        arrived: when it, or its last tree, arrived at the engine.
        left: when its last verdict was known, while its client has not sent the next tree; None else.
        away: seconds between its last verdict and the tree after it; None before that.
        delivered: tokens that the event loop has.
        sent: tokens that its client has.
        is_reading: whether a read of its client waits for tokens.
    """

    request: SimulatedRequest
    unread: int
    written: int = 0
    rounds: int = 0
    first: float = 0.0
    end: float = 0.0
    has_first: bool = False
    queued: bool = False
    arrived: float = 0.0
    left: float | None = None
    away: float | None = None
    delivered: int = 0
    sent: int = 0
    is_reading: bool = False

    @property
    def outcome(self) -> RoundOutcome:
        """The outcome of the next round."""
        outcomes = self.request.outcomes
        return outcomes[self.rounds % len(outcomes)]

    @property
    def is_written(self) -> bool:
        """Whether its text has ended."""
        return self.written >= self.request.output

    @property
    def due(self) -> float | None:
        """When its next tree is expected: after as long as the last one; None if that is unknown."""
        return None if self.left is None or self.away is None else self.left + self.away


@dataclass(frozen=True, slots=True)
class Step:
    """What a step does.

    Attributes:
        deciding: sequences that write.
        batch: sequences with rows.
        rows: rows of its pass.
        prompt_rows: of these, those that only read prompts.
        prefix: mean tokens before the rows of a sequence.
    """

    deciding: list[Running]
    batch: int
    rows: int
    prompt_rows: int
    prefix: float


@dataclass(slots=True)
class Replica:
    """An engine. Mutated by `Fleet`.

    Attributes:
        host: its interpreter.
        waiting: sequences without a place in the batch.
        running: sequences that can take part in a step.
        away: sequences whose clients draft.
        load: requests that are not over.
        busy: seconds in steps.
        is_stepping: whether a step runs.
        ended: when the last step ended.
        version: of the next end of a work of the host: earlier ones do not count.
    """

    host: Host
    waiting: list[Running] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    away: list[Running] = field(default_factory=list)
    load: int = 0
    busy: float = 0.0
    is_stepping: bool = False
    ended: float = 0.0
    version: int = 0

    def admit(self, max_batch: int) -> None:
        """Move waiting sequences into the batch while it has places."""
        while self.waiting and len(self.running) + len(self.away) < max_batch:
            self.running.append(self.waiting.pop(0))
        for one in self.waiting:
            one.queued = True

    def patient_until(self, fixed: float) -> float | None:
        """Return until when the next step waits for trees (`engine/gathering.py`); None if it does not.

        Args:
            fixed: seconds of a pass over one row.
        """
        if not self.running or self.waiting:
            return None
        first = min(one.arrived for one in self.running)
        since = (first, max(first, self.ended))
        ends = [longest_wait(*since, one.due, one.away, fixed) for one in self.away]
        return max((end for end in ends if end is not None), default=None)

    def next_step(self, prefill_busy: int) -> Step | None:
        """Read the next parts of prompts, and return the step; None if there is nothing to do.

        Args:
            prefill_busy: prompt tokens of a pass while sequences are decoded.
        """
        if not self.running:
            return None
        deciding, budget = list[Running](), PREFILL_TOKENS_IDLE
        if any(one.written for one in self.running):
            budget = prefill_busy
        rows = prompt_rows = 0
        reading = [one for one in self.running if not one.written]
        for one, share in zip(reading, split_prefill_budget([one.unread for one in reading], budget), strict=True):
            one.unread -= share
            rows += share
            prompt_rows += share - (0 if one.unread else min(1, share))  # the root of a first tree ends its prompt
        for one in self.running:
            if one.written or not one.unread:
                deciding.append(one)
                rows += one.outcome.nodes + (1 if one.written else 0)
        if not rows:
            return None
        batch = sum(1 for one in self.running if one.written or one.unread < one.request.prompt)
        prefix = statistics.fmean(one.request.prompt - one.unread + one.written for one in self.running)
        return Step(deciding, max(1, batch), rows, prompt_rows, prefix)
