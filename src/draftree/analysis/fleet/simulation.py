"""Event queue of a simulated fleet: routing, batched steps of replicas, messages, network delay. No torch.

A replica steps like the engine: every step is one pass over the running sequences, each with its root and its draft,
and over chunks of waiting prompts; the last chunk of a prompt is read with its first tree. Clients that draft leave the
batch after each round until their next tree arrives. Clients that read ask for tokens by messages. Messages and the
engine's work besides passes share the interpreter of the server (`host.py`).
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from draftree.analysis.fleet.curves import PassCurve
from draftree.analysis.fleet.host import Action, Host, HostCosts
from draftree.analysis.fleet.replica import Replica, Running, Step
from draftree.analysis.fleet.result import FleetResult
from draftree.analysis.fleet.workload import SimulatedRequest
from draftree.engine.prefill import PREFILL_TOKENS_BUSY

__all__ = ["Fleet", "FleetSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """A fleet.

    Attributes:
        replicas: number of engines.
        max_batch: sequences that run at once in each.
        host: time of each server besides passes.
        passes_on_host: whether passes and messages compete for one core, as passes of one thread on the processor do.
        round_trip: seconds on the network between a verdict and the arrival of the next tree, if clients draft; None if
            the server drafts.
        read_trip: seconds on the network between tokens and the arrival of the next read, if clients read texts by
            messages that the server writes alone; None if nothing is read by messages.
        opens: whether requests arrive as messages that open texts. The first tree of a client that drafts follows after
            a round trip and the draft.
        client_overhead: seconds of a client per message besides its draft and the network.
        jitter: largest random delay of a tree on its way, in seconds: without one, trees that left together return
            together, and the first of them never begins a pass alone.
        seed: of these delays.
        gathers: whether steps wait for trees that are about to return (`engine/gathering.py`).
        known_pass: seconds of a pass over one row as the server has measured it, which decides how long steps wait;
            None for those of the curve.
        prefill_busy: prompt tokens of a pass while sequences are decoded.
    """

    replicas: int = 1
    max_batch: int = 32
    host: HostCosts = field(default_factory=HostCosts)
    passes_on_host: bool = False
    round_trip: float | None = None
    read_trip: float | None = None
    opens: bool = False
    client_overhead: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    gathers: bool = False
    known_pass: float | None = None
    prefill_busy: int = PREFILL_TOKENS_BUSY


class Fleet:
    """A simulated fleet.

    Args:
        curve: cost of passes.
        settings: the fleet.
    """

    def __init__(self, curve: PassCurve, settings: FleetSettings) -> None:
        self._curve, self._settings, self._costs = curve, settings, settings.host
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self._replicas = [Replica(Host(settings.host.wake_up)) for _ in range(settings.replicas)]
        self._changed = set[int]()
        """Indices of replicas that may begin a step."""
        self._done: list[Running] = []
        self._steps = 0
        self._delays = random.Random(settings.seed)

    def run(self, requests: Iterable[SimulatedRequest]) -> FleetResult:
        """Simulate all requests to their ends."""
        given = [Running(request, request.prompt) for request in requests]
        for one in given:
            self._push(one.request.arrival, partial(self._arrive, one))
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:  # what happens at once shares a step
                heapq.heappop(self._events)[2](now)
            changed, self._changed = sorted(self._changed), set()
            for index in changed:
                self._step(index, now)
        first = min((one.request.arrival for one in given), default=0.0)
        spent = max((one.end for one in given), default=first) - first
        return FleetResult(
            spent,
            sum(one.written for one in self._done),
            tuple(one.first - one.request.arrival for one in self._done),
            tuple((one.end - one.first) / max(1, one.written - 1) for one in self._done),
            statistics.fmean(replica.busy for replica in self._replicas) / spent if spent else 0.0,
            sum(one.queued for one in self._done) / max(1, len(self._done)),
            self._steps,
            tuple(one.end - one.request.arrival for one in given),
        )

    def _push(self, when: float, action: Action) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    # the interpreter of a server

    def _message(self, index: int, seconds: float, action: Action, now: float) -> None:
        """Do the work of a message on a server, then the action."""
        if seconds > 0:
            self._replicas[index].host.add(now, seconds, action)
            self._follow_host(index)
        else:
            action(now)

    def _work(self, index: int, seconds: float, action: Action, now: float) -> None:
        """Do a work of the engine of a server, then the action."""
        self._replicas[index].host.begin(now, seconds, action)
        self._follow_host(index)

    def _follow_host(self, index: int) -> None:
        """Make the next end of a work of the host an event, in place of the one before."""
        replica = self._replicas[index]
        replica.version += 1
        end = replica.host.next_end
        if end is not None:
            self._push(end, partial(self._end_work, index, replica.version))

    def _end_work(self, index: int, version: int, now: float) -> None:
        replica = self._replicas[index]
        if version == replica.version:
            for action in replica.host.take_ended(now):
                action(now)
            self._follow_host(index)

    # clients

    def _arrive(self, one: Running, now: float) -> None:
        index = min(range(len(self._replicas)), key=lambda place: (self._replicas[place].load, place))
        self._replicas[index].load += 1
        settings, costs = self._settings, self._costs
        if settings.opens:
            self._message(index, costs.opening, partial(self._open, index, one), now)
        elif settings.round_trip is not None:
            self._message(index, costs.tree_message, partial(self._register, index, one), now)
        else:
            self._register(index, one, now)

    def _open(self, index: int, one: Running, now: float) -> None:
        settings = self._settings
        if settings.round_trip is not None:
            self._draft(index, one, now)
            return
        self._register(index, one, now)
        if settings.read_trip is not None:
            self._push(now + settings.read_trip + settings.client_overhead, partial(self._read, index, one))

    def _draft(self, index: int, one: Running, now: float) -> None:
        """Let a client draft, after a reply."""
        settings = self._settings
        away = (settings.round_trip or 0.0) + settings.client_overhead + one.outcome.draft_seconds
        action = partial(self._register, index, one)
        self._push(
            now + away + settings.jitter * self._delays.random(),
            partial(self._message, index, self._costs.tree_message, action),
        )

    def _register(self, index: int, one: Running, now: float) -> None:
        """Let a sequence take part in the next step: it is new, or its tree has arrived."""
        replica = self._replicas[index]
        one.arrived = now
        if one.left is None:
            replica.waiting.append(one)
        else:
            one.away, one.left = now - one.left, None
            replica.away.remove(one)
            replica.running.append(one)
        self._changed.add(index)

    def _read(self, index: int, one: Running, now: float) -> None:
        self._message(index, self._costs.read_message, partial(self._begin_read, index, one), now)

    def _begin_read(self, index: int, one: Running, now: float) -> None:
        one.is_reading = True
        self._answer_read(index, one, now)

    def _answer_read(self, index: int, one: Running, now: float) -> None:
        if one.is_reading and one.delivered > one.sent:
            one.is_reading = False
            self._message(index, self._costs.tokens_message, partial(self._end_read, index, one), now)

    def _end_read(self, index: int, one: Running, now: float) -> None:
        settings = self._settings
        one.sent = one.delivered
        self._note_sent(index, one, is_last=one.sent >= one.request.output, now=now)
        if one.sent < one.request.output:
            self._push(now + (settings.read_trip or 0.0) + settings.client_overhead, partial(self._read, index, one))

    def _note_sent(self, index: int, one: Running, *, is_last: bool, now: float) -> None:
        """Note that tokens of a text were sent."""
        if not one.has_first:
            one.first, one.has_first = now, True
        if is_last:
            one.end = now
            self._replicas[index].load -= 1
            self._done.append(one)

    # steps

    def _step(self, index: int, now: float) -> None:
        """Begin a step if the replica is idle and has work."""
        replica, settings = self._replicas[index], self._settings
        if replica.is_stepping:
            return
        replica.admit(settings.max_batch)
        if settings.gathers and replica.running:
            until = replica.patient_until(self._known_pass(replica))
            if until is not None and until > now:
                self._push(until, lambda _: self._changed.add(index))  # unless a tree begins the step before
                return
        step = replica.next_step(settings.prefill_busy)
        if step is None:
            return
        replica.is_stepping, self._steps = True, self._steps + 1
        trees = 0 if settings.round_trip is None else len(step.deciding)
        beside = self._costs.step(len(step.deciding), trees=trees, rows=step.rows)
        beside += self._costs.prompt_step if step.prompt_rows else 0.0
        after = self._costs.after * beside
        end = partial(self._end_step, index, step, now)
        finish = partial(self._work, index, after, end)
        self._work(index, beside - after, partial(self._pass, index, step, finish), now)

    def _known_pass(self, replica: Replica) -> float:
        """Return the seconds of a pass over one row, as the server knows them."""
        known = self._settings.known_pass
        return self._curve.seconds(1, 1, replica.running[0].request.prompt) if known is None else known

    def _pass(self, index: int, step: Step, finish: Action, now: float) -> None:
        seconds = self._curve.seconds(step.batch, step.rows, step.prefix, prompt_rows=step.prompt_rows)
        seconds += self._drafting(step.deciding)
        launch = self._costs.launching(len(step.deciding), step.rows)
        if self._settings.passes_on_host:
            self._work(index, seconds, finish, now)
        elif launch > 0:
            self._work(index, launch, lambda done: self._push(max(done, now + seconds), finish), now)
        else:
            self._push(now + seconds, finish)

    def _drafting(self, deciding: Sequence[Running]) -> float:
        """Return the seconds of drafting for all sequences of a step."""
        if self._settings.round_trip is not None or not deciding:
            return 0.0
        each = [one.outcome.draft_seconds for one in deciding]
        return max(each) + self._costs.draft_share * (sum(each) - max(each))

    def _end_step(self, index: int, step: Step, begun: float, now: float) -> None:
        replica, settings, costs = self._replicas[index], self._settings, self._costs
        replica.is_stepping, replica.ended = False, now
        replica.busy += now - begun
        for one in step.deciding:
            one.written = min(one.request.output, one.written + one.outcome.tokens)
            one.rounds += 1
        leaving = {one for one in step.deciding if one.is_written or settings.round_trip is not None}
        replica.running = [one for one in replica.running if one not in leaving]
        for one in step.deciding:
            if settings.round_trip is not None:
                if not one.is_written:
                    one.left = now
                    replica.away.append(one)
                self._message(index, costs.verdict_message, partial(self._end_verdict, index, one), now)
            elif settings.read_trip is not None:
                self._message(index, costs.update, partial(self._deliver, index, one, one.written), now)
            else:
                self._note_sent(index, one, is_last=one.is_written, now=now)
        self._changed.add(index)

    def _end_verdict(self, index: int, one: Running, now: float) -> None:
        self._note_sent(index, one, is_last=one.is_written, now=now)
        if not one.is_written:
            self._draft(index, one, now)

    def _deliver(self, index: int, one: Running, written: int, now: float) -> None:
        one.delivered = written
        self._answer_read(index, one, now)
