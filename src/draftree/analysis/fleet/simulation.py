"""Event queue of a simulated fleet: routing, batched steps of replicas, network delay. No torch.

A replica steps like the engine: every step is one pass over the running sequences, each with its root and its draft,
and over chunks of waiting prompts; the last chunk of a prompt is read with its first tree. With a `round_trip`, a
sequence leaves the batch after each round, for the time of the round trip, of its draft and of its client's own work.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftree.analysis.fleet.curves import PassCurve
from draftree.analysis.fleet.workload import RoundOutcome, SimulatedRequest
from draftree.engine.gathering import longest_wait
from draftree.engine.prefill import PREFILL_TOKENS_BUSY, PREFILL_TOKENS_IDLE, split_prefill_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """A fleet.

    Attributes:
        replicas: number of engines.
        max_batch: sequences that run at once in each.
        overhead: seconds of a step besides the pass.
        overhead_per_sequence: seconds that each sequence adds to a step besides the pass.
        draft_share: what drafting for a further sequence of a step costs, as a share of drafting for it alone: 0 if all
            are drafted in the time of one, 1 if one after another.
        round_trip: seconds on the network between a verdict and the arrival of the next tree, if clients draft; None if
            the server drafts.
        client_overhead: seconds of a client per round besides its draft and the network.
        jitter: largest random delay of a tree on its way, in seconds: without one, trees that left together return
            together, and the first of them never begins a pass alone.
        gathers: whether steps wait for trees that are about to return (`engine/gathering.py`).
        prefill_busy: prompt tokens of a pass while sequences are decoded.
    """

    replicas: int = 1
    max_batch: int = 32
    overhead: float = 0.0
    overhead_per_sequence: float = 0.0
    draft_share: float = 0.0
    round_trip: float | None = None
    client_overhead: float = 0.0
    jitter: float = 0.0
    gathers: bool = False
    prefill_busy: int = PREFILL_TOKENS_BUSY


@dataclass(slots=True, eq=False)
class _Running:
    """A request in a replica. Mutated by `_Replica`."""

    request: SimulatedRequest
    unread: int
    written: int = 0
    rounds: int = 0
    first: float = 0.0
    end: float = 0.0
    queued: bool = False
    arrived: float = 0.0
    due: float = 0.0
    """When the tree of a client that is away arrives."""
    away: float = 0.0
    """Seconds for which it is away."""

    @property
    def outcome(self) -> RoundOutcome:
        outcomes = self.request.outcomes
        return outcomes[self.rounds % len(outcomes)]


@dataclass(slots=True)
class _Replica:
    """An engine. Mutated by `Fleet`."""

    waiting: list[_Running] = field(default_factory=list)
    running: list[_Running] = field(default_factory=list)
    away: list[_Running] = field(default_factory=list)
    """Sequences whose clients are drafting."""
    busy: float = 0.0
    is_stepping: bool = False
    ended: float = 0.0
    """When the last step ended."""

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.away)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Results of a simulation.

    Attributes:
        seconds: from the first arrival to the last token.
        tokens: tokens written.
        first_token: seconds from arrival to the first token of each request, in order of their ends.
        per_token: mean seconds between the later tokens of each request.
        busy: share of the time that replicas were in a step.
        queued: share of requests that waited for a place in a batch.
        steps: passes.
    """

    seconds: float
    tokens: int
    first_token: tuple[float, ...]
    per_token: tuple[float, ...]
    busy: float
    queued: float
    steps: int
    by_request: tuple[float, ...] = ()
    """Seconds from the arrival to the last token of each request, in the order in which they were given."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole fleet."""
        return self.tokens / self.seconds if self.seconds else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below this share of the values; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Fleet:
    """A simulated fleet.

    Args:
        curve: cost of passes.
        settings: the fleet.
    """

    def __init__(self, curve: PassCurve, settings: FleetSettings) -> None:
        self._curve, self._settings = curve, settings
        self._events: list[tuple[float, int, str, int, list[_Running]]] = []
        self._numbers = itertools.count()
        self._replicas = [_Replica() for _ in range(settings.replicas)]
        self._done: list[_Running] = []
        self._steps = 0
        self._delays = random.Random(0)

    def run(self, requests: Iterable[SimulatedRequest]) -> FleetResult:
        """Simulate all requests to their ends."""
        first, given = None, list[_Running]()
        for request in requests:
            first = request.arrival if first is None else min(first, request.arrival)
            given.append(_Running(request, request.prompt))
            self._push(request.arrival, "arrive", -1, [given[-1]])
        now = first or 0.0
        while self._events:
            now, changed = self._events[0][0], set[int]()
            while self._events and self._events[0][0] == now:  # what happens at once shares a step
                _, _, kind, index, sequences = heapq.heappop(self._events)
                changed.add(self._change(kind, index, sequences, now))
            for index in sorted(changed):
                self._step(index, now)
        spent = now - (first or 0.0)
        busy = statistics.fmean(replica.busy for replica in self._replicas) / spent if spent else 0.0
        later = [(one.end - one.first) / max(1, one.written - 1) for one in self._done]
        return FleetResult(
            spent,
            sum(one.written for one in self._done),
            tuple(one.first - one.request.arrival for one in self._done),
            tuple(later),
            busy,
            sum(one.queued for one in self._done) / max(1, len(self._done)),
            self._steps,
            tuple(one.end - one.request.arrival for one in given),
        )

    def _change(self, kind: str, index: int, sequences: list[_Running], now: float) -> int:
        """Apply an event; return the replica that it concerns."""
        if kind == "arrive":
            index = min(range(len(self._replicas)), key=lambda one: (self._replicas[one].load, one))
            self._replicas[index].waiting += sequences
            for one in sequences:
                one.arrived = now
        elif kind == "return":
            for one in sequences:
                self._replicas[index].away.remove(one)
                one.arrived = now
            self._replicas[index].running += sequences
        else:
            self._end_step(index, sequences, now)
        return index

    def _push(self, when: float, kind: str, index: int, sequences: list[_Running]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), kind, index, sequences))

    def _step(self, index: int, now: float) -> None:
        """Begin a step if the replica is idle and has work."""
        replica, settings = self._replicas[index], self._settings
        if replica.is_stepping:
            return
        while replica.waiting and len(replica.running) + len(replica.away) < settings.max_batch:
            replica.running.append(replica.waiting.pop(0))
        for one in replica.waiting:
            one.queued = True
        if self._waits(replica):
            return  # the return of another tree begins the step
        deciding, rows, prompt_rows = self._rows(replica)
        if not rows:
            return
        batch = sum(1 for one in replica.running if one.written or one.unread < one.request.prompt)
        prefix = statistics.fmean(one.request.prompt - one.unread + one.written for one in replica.running)
        seconds = self._curve.seconds(max(1, batch), rows, prefix, prompt_rows=prompt_rows) + self._drafting(deciding)
        seconds += settings.overhead + settings.overhead_per_sequence * len(deciding)
        replica.is_stepping, self._steps = True, self._steps + 1
        replica.busy += seconds
        self._push(now + seconds, "step", index, deciding)

    def _waits(self, replica: _Replica) -> bool:
        """Return whether a step waits for a tree that is about to return."""
        if not (self._settings.gathers and replica.running) or replica.waiting:
            return False
        first = min(one.arrived for one in replica.running)
        fixed = self._curve.seconds(1, 1, replica.running[0].request.prompt)
        since = (first, max(first, replica.ended))
        return any(longest_wait(*since, one.due, one.away, fixed) is not None for one in replica.away)

    def _rows(self, replica: _Replica) -> tuple[list[_Running], int, int]:
        """Return the sequences of a step that decode, its rows, and of these the rows that only read prompts."""
        deciding, budget = list[_Running](), PREFILL_TOKENS_IDLE
        if any(one.written for one in replica.running):
            budget = self._settings.prefill_busy
        rows = prompt_rows = 0
        reading = [one for one in replica.running if not one.written]
        for one, share in zip(reading, split_prefill_budget([one.unread for one in reading], budget), strict=True):
            one.unread -= share
            rows += share
            prompt_rows += share - (0 if one.unread else min(1, share))  # the root of a first tree ends its prompt
        for one in replica.running:
            if one.written or not one.unread:
                deciding.append(one)
                rows += one.outcome.nodes + (1 if one.written else 0)
        return deciding, rows, prompt_rows

    def _drafting(self, deciding: Sequence[_Running]) -> float:
        """Return the seconds of drafting for all sequences of a step."""
        if self._settings.round_trip is not None or not deciding:
            return 0.0
        each = [one.outcome.draft_seconds for one in deciding]
        return max(each) + self._settings.draft_share * (sum(each) - max(each))

    def _end_step(self, index: int, deciding: Sequence[_Running], now: float) -> None:
        replica, settings = self._replicas[index], self._settings
        away = (settings.round_trip or 0.0) + settings.client_overhead
        replica.is_stepping, replica.ended = False, now
        leaving = set[_Running]()
        for one in deciding:
            outcome = one.outcome
            one.first = one.first if one.written else now
            one.written = min(one.request.output, one.written + outcome.tokens)
            one.rounds, one.end = one.rounds + 1, now
            if one.written == one.request.output:
                leaving.add(one)
                self._done.append(one)
            elif settings.round_trip is not None:
                leaving.add(one)
                replica.away.append(one)
                one.away = away + outcome.draft_seconds + settings.jitter * self._delays.random()
                one.due = now + one.away
                self._push(one.due, "return", index, [one])
        replica.running = [one for one in replica.running if one not in leaving]
