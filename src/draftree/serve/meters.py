"""Counts of the engine's rounds and of requests, as plain numbers: cheap to update, read when metrics are collected.

Every object has one writer: a `ModelMeter` its engine's thread, a `RequestMeter` the event loop.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.host import Clock
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.serve.records import RequestRecord

__all__ = ["DraftTotals", "Histogram", "ModelMeter", "Rates", "RequestMeter"]

WINDOW_SECONDS = 5.0
"""Span of the rates in the status."""
WINDOW_ROUNDS = 1024
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
PHASES = ("plan", "draft", "score", "verify", "commit")
OTHER = "other"
"""Endpoint of requests without a route, and model of requests without one."""


@final
class Histogram:
    """Counts of values per bucket.

    Args:
        bounds: upper bounds of the buckets, increasing; one more bucket has no bound.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, several times if it stands for several."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(slots=True)
class DraftTotals:
    """Counts of one model and one drafter.

    Attributes:
        drafts: sequences' rounds with a draft.
        draft_tokens: drafted tokens.
        generated_tokens: written tokens.
        accepted: number of sequences' rounds with a draft by the number of accepted tokens.
        token_gaps: seconds between two tokens of a sequence.
    """

    drafts: int = 0
    draft_tokens: int = 0
    generated_tokens: int = 0
    accepted: list[int] = field(default_factory=lambda: [0, 0])
    token_gaps: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were written."""
        return sum(count * rounds for count, rounds in enumerate(self.accepted))

    def accepted_per_position(self) -> list[int]:
        """Return how often the drafted token at position 0, 1, … was accepted."""
        return [sum(self.accepted[position + 1 :]) for position in range(len(self.accepted) - 1)]

    def count(self, row: SequenceRecord) -> None:
        """Count one sequence of a round."""
        self.generated_tokens += row.num_written
        if row.num_drafted:
            self.drafts += 1
            self.draft_tokens += row.num_drafted
            while len(self.accepted) <= row.num_accepted:
                self.accepted.append(0)
            self.accepted[row.num_accepted] += 1


@dataclass(slots=True)
class _Active:
    """A request in the engine: its drafter, and when its sequences of each index were written.

    Attributes:
        draft: the drafter.
        times: the last two rounds by index, the earlier None at first; prompts of one request share their indices.
    """

    draft: str
    times: dict[int, tuple[float | None, float]] = field(default_factory=dict)

    def gap(self, index: int, now: float) -> float | None:
        """Note a round, and return the seconds since the round before."""
        before, last = self.times.get(index, (None, now))
        if last != now:
            before = last
        self.times[index] = before, now
        return None if before is None else now - before


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the last seconds; None where nothing was written or drafted.

    Attributes:
        tokens_per_second: of all sequences together.
        acceptance_length: tokens per round of a sequence.
        acceptance_rate: accepted tokens per drafted token.
    """

    tokens_per_second: float
    acceptance_length: float | None
    acceptance_rate: float | None


@final
class ModelMeter:
    """Counts of one model's rounds.

    Args:
        default_draft: the drafter of requests that are not registered.
        clock: clock of rates and gaps.
    """

    def __init__(self, default_draft: str, *, clock: Clock = time.perf_counter) -> None:
        self.num_rounds = 0
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.by_draft: dict[str, DraftTotals] = {default_draft: DraftTotals()}
        self._default_draft = default_draft
        self._clock = clock
        self._active: dict[str, _Active] = {}
        self._recent: deque[tuple[float, int, int, int, int]] = deque(maxlen=WINDOW_ROUNDS)

    def register(self, request_id: str, draft: str) -> None:
        """Note the drafter of a request before it is queued."""
        self._active[request_id] = _Active(draft)

    def release(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._active.pop(request_id, None)

    def on_round(self, record: RoundRecord) -> None:
        """Count a round; for the engine's thread."""
        now = self._clock()
        self.num_rounds += 1
        seconds = self.phase_seconds
        seconds["plan"] += record.plan_seconds
        seconds["draft"] += record.draft_seconds
        seconds["score"] += record.score_seconds
        seconds["verify"] += record.verify_seconds
        seconds["commit"] += record.commit_seconds
        written = drafted = accepted = 0
        for row in record.sequences:
            self._count(row, now)
            written += row.num_written
            drafted += row.num_drafted
            accepted += row.num_accepted
        self._recent.append((now, written, len(record.sequences), drafted, accepted))

    def _count(self, row: SequenceRecord, now: float) -> None:
        active = self._active.get(row.request_id)
        draft = self._default_draft if active is None else active.draft
        totals = self.by_draft.get(draft)
        if totals is None:
            totals = self.by_draft[draft] = DraftTotals()
        totals.count(row)
        if active is not None and row.num_written:
            seconds = active.gap(row.index, now)
            if seconds is not None:
                totals.token_gaps.observe(seconds / row.num_written, row.num_written)

    def rates(self) -> Rates:
        """Return the rates of the last seconds."""
        now = self._clock()
        recent = [row for row in self._recent.copy() if now - row[0] <= WINDOW_SECONDS]
        written, rows, drafted, accepted = (sum(row[place] for row in recent) for place in (1, 2, 3, 4))
        return Rates(
            tokens_per_second=written / WINDOW_SECONDS,
            acceptance_length=written / rows if rows else None,
            acceptance_rate=accepted / drafted if drafted else None,
        )


@final
class RequestMeter:
    """Counts of HTTP requests."""

    def __init__(self) -> None:
        self.by_status: Counter[tuple[str, str, int]] = Counter()
        """By endpoint, model and status."""
        self.finish_reasons: Counter[tuple[str, str]] = Counter()
        """By model and reason."""
        self.num_disconnected = 0
        self.queue_seconds = Histogram()
        self.first_token: dict[tuple[str, str], Histogram] = {}
        """By model and drafter."""
        self.duration: dict[tuple[str, str], Histogram] = {}
        """By model and drafter."""

    def observe(self, record: RequestRecord) -> None:
        """Count a finished request."""
        self.by_status[record.endpoint or OTHER, record.model or OTHER, record.status or 500] += 1
        self.num_disconnected += record.is_disconnected
        if record.queue_seconds is not None:
            self.queue_seconds.observe(record.queue_seconds)
        if record.model is None or record.draft is None:
            return
        labels = (record.model, record.draft)
        for reason in record.finish_reasons:
            self.finish_reasons[record.model, reason] += 1
        if record.first_token_seconds is not None:
            self.first_token.setdefault(labels, Histogram()).observe(record.first_token_seconds)
            self.duration.setdefault(labels, Histogram()).observe(record.seconds)
