"""A simulated fleet: requests, replicas, the hosts of servers, the network, and the queue of events. No torch.

A replica steps like the engine: every step is one pass over the running sequences, each with its root and its draft,
and over chunks of waiting prompts; the last chunk of a prompt is read with its first tree. Clients that draft leave the
batch after each round until their next tree arrives. Clients that read ask for tokens by messages.

A server is one process. Its event loop reads, checks and answers messages; the engine's thread prepares passes and
verifies their results. Only one of them holds the interpreter at a time, so messages delay passes and passes delay
messages. A pass that is computed elsewhere does not hold it, except for its launch: what the host does for a pass while
it runs.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import final

from draftree.engine.client_drafts import longest_wait
from draftree.engine.scheduler import PREFILL_TOKENS_IDLE, split_prefill_budget
from draftree.engine.trace import Trace
from draftree.lab.fleet.curves import PassCurve
from draftree.options import PREFILL_TOKENS_BUSY


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What one round of one sequence did in any batch: scored draft nodes, written tokens, draft seconds."""

    nodes: int
    tokens: int
    draft_seconds: float = 0.0


PLAIN = (RoundOutcome(0, 1),)
"""Outcomes of plain decoding."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request: its arrival in seconds, its tokens, and the outcomes of its rounds, repeated if its text is longer."""

    arrival: float
    prompt: int
    output: int
    outcomes: Sequence[RoundOutcome] = PLAIN


def outcomes_of(trace: Trace) -> dict[str, tuple[RoundOutcome, ...]]:
    """Return the outcomes of each sequence of a recorded run, in order.

    Under a rule that keeps the text, an outcome depends on the text and the draft and not on the batch or the machine,
    so it may be replayed in another one.
    """
    found: dict[str, list[RoundOutcome]] = {}
    for one in trace.rounds:
        each = one.seconds["draft"] / max(1, len(one.steps))
        for step in one.steps:
            nodes = len(step.tree) if step.kept is None else len(step.kept)
            found.setdefault(step.sequence, []).append(RoundOutcome(nodes, step.num_written, each))
    return {name: tuple(rounds) for name, rounds in found.items()}


def mean_outcomes(tokens_per_round: float, nodes: int, draft_seconds: float = 0.0) -> tuple[RoundOutcome, ...]:
    """Return outcomes with a mean of `tokens_per_round` (from 1 to `nodes` + 1), in an even order."""
    rounds = 20
    written = 0
    found = []
    for index in range(1, rounds + 1):
        due = round(index * tokens_per_round)
        found.append(RoundOutcome(nodes, max(1, due - written), draft_seconds))
        written = max(written + 1, due)
    return tuple(found)


def poisson(
    rate: float, *, count: int, prompt: int, output: int, outcomes: Sequence[RoundOutcome] = PLAIN, seed: int = 0
) -> Iterator[SimulatedRequest]:
    """Yield requests that arrive independently, `rate` a second, with geometric lengths around the given means."""
    choose = random.Random(seed)
    now = 0.0
    for _ in range(count):
        now += choose.expovariate(rate)
        lengths = [max(1, round(choose.expovariate(1 / mean))) for mean in (prompt, output)]
        start = choose.randrange(len(outcomes))
        turned = tuple(itertools.islice(itertools.cycle(outcomes), start, start + len(outcomes)))
        yield SimulatedRequest(now, min(lengths[0], 8 * prompt), min(lengths[1], 8 * output), turned)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Results of a simulation.

    Attributes:
        seconds: from the first arrival to the last token.
        first_token: seconds from arrival to the first token of each request, in order of their ends.
        per_token: mean seconds between the later tokens of each request.
        busy: share of the time that replicas were in a step.
        queued: share of requests that waited for a place in a batch.
        by_request: seconds from the arrival to the last token of each request, in the order in which they were given.
            Times end when the server has sent the tokens.
    """

    seconds: float
    tokens: int
    first_token: tuple[float, ...]
    per_token: tuple[float, ...]
    busy: float
    queued: float
    steps: int
    by_request: tuple[float, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole fleet."""
        return self.tokens / self.seconds if self.seconds else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below this share of the values; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


Action = Callable[[float], None]
"""Called with the time at which a work has ended."""
DONE = 1e-10
"""Seconds of work that are too little to be left: rounding."""
SHARES = ("draft_share", "after")
"""Costs that are no seconds."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Time of the host besides passes. Seconds.

    Attributes:
        overhead: of the engine for every step.
        overhead_per_sequence: that each sequence adds to a step.
        draft_share: cost of drafting for a further sequence, as a share of drafting for it alone.
        overhead_per_tree: that the tree of a client adds to a step, besides its sequence: it is registered.
        overhead_per_row: that each row adds to a step: target tokens are computed and compared.
        prompt_step: of the engine for every step that reads prompts, besides the others.
        launch: of the engine for every pass while it runs elsewhere; the pass ends no earlier than this work.
        launch_per_sequence: that each sequence adds to it.
        launch_per_row: that each row adds to it.
        after: share of the overheads of a step that follows the pass; the rest precedes it.
        opening: of the event loop for a text that a client opens, or of the engine to begin and end a text.
        tree_message: of the event loop for a frame with a tree: receive, decode, check, and hand to the engine.
        verdict_message: of the event loop for the answer: encode and send.
        read_message: of the event loop for a frame that asks for tokens.
        tokens_message: of the event loop for the answer with tokens.
        update: of the event loop for new tokens of a text, whether or not a client asks for them now.
        wake_up: that the first message costs after a pause of the event loop.
    """

    overhead: float = 0.0
    overhead_per_sequence: float = 0.0
    draft_share: float = 0.0
    overhead_per_tree: float = 0.0
    overhead_per_row: float = 0.0
    prompt_step: float = 0.0
    launch: float = 0.0
    launch_per_sequence: float = 0.0
    launch_per_row: float = 0.0
    after: float = 0.5
    opening: float = 0.0
    tree_message: float = 0.0
    verdict_message: float = 0.0
    read_message: float = 0.0
    tokens_message: float = 0.0
    update: float = 0.0
    wake_up: float = 0.0

    def step(self, sequences: int, *, trees: int = 0, rows: int = 0) -> float:
        """Return the seconds of the engine for a step besides its pass."""
        own = self.overhead + self.overhead_per_sequence * sequences
        return own + self.overhead_per_tree * trees + self.overhead_per_row * rows

    def launching(self, sequences: int, rows: int) -> float:
        """Return the seconds of the engine for a pass while it runs elsewhere."""
        return self.launch + self.launch_per_sequence * sequences + self.launch_per_row * rows

    def times(self, factor: float) -> HostCosts:
        """Return the costs of a host that takes so many times as long; shares stay."""
        seconds = {one.name: factor * getattr(self, one.name) for one in fields(self) if one.name not in SHARES}
        return replace(self, **seconds)


@final
class Host:
    """The interpreter of a server, with two threads: messages on the event loop, and one work of the engine.

    If both have work, each gets half of the time. The event loop gives all messages that it has the same time: it takes
    a part of each in turn, as each takes several of its iterations. So messages that come together end together.
    Mutated by `Fleet` only.
    """

    def __init__(self, wake_up: float = 0.0) -> None:
        self._wake_up = wake_up
        self._now = 0.0
        self._waking = 0.0
        """Seconds that are left before messages."""
        self._idle_since = -1.0
        """When the last message ended; what follows from it at once needs no waking."""
        self._given = 0.0
        """Seconds that every message has been given."""
        self._messages: list[tuple[float, int, Action]] = []
        """Heap: value of `_given` at which a message ends, its number, and what follows."""
        self._numbers = itertools.count()
        self._engine: tuple[float, Action] | None = None

    def add(self, now: float, seconds: float, action: Action) -> None:
        """Add the work of a message."""
        self._advance(now)
        if not self._messages and now != self._idle_since:
            self._waking = self._wake_up
        heapq.heappush(self._messages, (self._given + seconds, next(self._numbers), action))

    def begin(self, now: float, seconds: float, action: Action) -> None:
        """Begin a work of the engine, which has none."""
        self._advance(now)
        self._engine = (seconds, action)

    @property
    def next_end(self) -> float | None:
        """When the next work ends if nothing is added; None if there is none."""
        rate = 0.5 if self._messages and self._engine is not None else 1.0
        left = [] if self._engine is None else [self._engine[0]]
        if self._messages:
            left.append(self._waking + len(self._messages) * max(0.0, self._messages[0][0] - self._given))
        return self._now + max(0.0, min(left)) / rate if left else None

    def take_ended(self, now: float) -> list[Action]:
        """Return what follows the works that have ended."""
        self._advance(now)
        found = list[Action]()
        while self._messages and self._messages[0][0] - self._given <= DONE:
            found.append(heapq.heappop(self._messages)[2])
            self._idle_since = now
        if self._engine is not None and self._engine[0] <= DONE:
            found.append(self._engine[1])
            self._engine = None
        return found

    def _advance(self, now: float) -> None:
        """Count the time since the last change. No work ends in between: its end is an event."""
        passed = now - self._now
        self._now = now
        if self._messages and self._engine is not None:
            passed /= 2
        if self._engine is not None:
            self._engine = (self._engine[0] - passed, self._engine[1])
        if self._messages:
            woken = min(passed, self._waking)
            self._waking -= woken
            self._given += (passed - woken) / len(self._messages)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request in a replica. Mutated by `Fleet`.

    Attributes:
        unread: tokens of its prompt that are not read yet.
        first: when its first tokens were there, for its client.
        end: when its last tokens were there.
        queued: whether it waited for a place in the batch.
        arrived: when it, or its last tree, arrived at the engine.
        left: when its last verdict was known, while its client has not sent the next tree; None else.
        away: seconds between its last verdict and the tree after it; None before that.
        delivered: tokens that the event loop has.
        sent: tokens that its client has.
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
        outcomes = self.request.outcomes
        return outcomes[self.rounds % len(outcomes)]

    @property
    def is_written(self) -> bool:
        return self.written >= self.request.output

    @property
    def due(self) -> float | None:
        """When its next tree is expected: after as long as the last one; None if that is unknown."""
        return None if self.left is None or self.away is None else self.left + self.away


@dataclass(frozen=True, slots=True)
class FleetStep:
    """What a step does: the sequences that write, those with rows, and the rows, of which some only read prompts.

    `prefix` is the mean number of tokens before the rows of a sequence.
    """

    deciding: list[RunningRequest]
    batch: int
    rows: int
    prompt_rows: int
    prefix: float


@dataclass(slots=True)
class Replica:
    """An engine. Mutated by `Fleet`.

    Attributes:
        version: of the next end of a work of the host: earlier ones do not count.
    """

    host: Host
    waiting: list[RunningRequest] = field(default_factory=list)
    running: list[RunningRequest] = field(default_factory=list)
    away: list[RunningRequest] = field(default_factory=list)
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
        """Return until when the next step waits for trees, as the engine does (`longest_wait`); None if it does not.

        `fixed` is the seconds of a pass over one row.
        """
        if not self.running or self.waiting:
            return None
        first = min(one.arrived for one in self.running)
        since = (first, max(first, self.ended))
        ends = [longest_wait(*since, one.due, one.away, fixed) for one in self.away]
        return max((end for end in ends if end is not None), default=None)

    def next_step(self, prefill_busy: int) -> FleetStep | None:
        """Read the next parts of prompts, and return the step; None if there is nothing to do."""
        if not self.running:
            return None
        deciding = list[RunningRequest]()
        budget = PREFILL_TOKENS_IDLE
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
        return FleetStep(deciding, max(1, batch), rows, prompt_rows, prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """A fleet.

    Attributes:
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
        gathers: whether steps wait for trees that are about to return (`engine/client_drafts.py`).
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
    """A simulated fleet."""

    def __init__(self, curve: PassCurve, settings: FleetSettings) -> None:
        self._curve = curve
        self._settings = settings
        self._costs = settings.host
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self._replicas = [Replica(Host(settings.host.wake_up)) for _ in range(settings.replicas)]
        self._changed = set[int]()
        """Indices of replicas that may begin a step."""
        self._done: list[RunningRequest] = []
        self._steps = 0
        self._delays = random.Random(settings.seed)

    def run(self, requests: Iterable[SimulatedRequest]) -> FleetResult:
        given = [RunningRequest(request, request.prompt) for request in requests]
        for one in given:
            self._push(one.request.arrival, partial(self._arrive, one))
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:  # what happens at once shares a step
                heapq.heappop(self._events)[2](now)
            changed = sorted(self._changed)
            self._changed = set()
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

    def _arrive(self, one: RunningRequest, now: float) -> None:
        index = min(range(len(self._replicas)), key=lambda place: (self._replicas[place].load, place))
        self._replicas[index].load += 1
        settings, costs = self._settings, self._costs
        if settings.opens:
            self._message(index, costs.opening, partial(self._open, index, one), now)
        elif settings.round_trip is not None:
            self._message(index, costs.tree_message, partial(self._register, index, one), now)
        else:
            self._register(index, one, now)

    def _open(self, index: int, one: RunningRequest, now: float) -> None:
        settings = self._settings
        if settings.round_trip is not None:
            self._draft(index, one, now)
            return
        self._register(index, one, now)
        if settings.read_trip is not None:
            self._push(now + settings.read_trip + settings.client_overhead, partial(self._read, index, one))

    def _draft(self, index: int, one: RunningRequest, now: float) -> None:
        """Let a client draft, after a reply."""
        settings = self._settings
        away = (settings.round_trip or 0.0) + settings.client_overhead + one.outcome.draft_seconds
        action = partial(self._register, index, one)
        self._push(
            now + away + settings.jitter * self._delays.random(),
            partial(self._message, index, self._costs.tree_message, action),
        )

    def _register(self, index: int, one: RunningRequest, now: float) -> None:
        """Let a sequence take part in the next step: it is new, or its tree has arrived."""
        replica = self._replicas[index]
        one.arrived = now
        if one.left is None:
            replica.waiting.append(one)
        else:
            one.away = now - one.left
            one.left = None
            replica.away.remove(one)
            replica.running.append(one)
        self._changed.add(index)

    def _read(self, index: int, one: RunningRequest, now: float) -> None:
        self._message(index, self._costs.read_message, partial(self._begin_read, index, one), now)

    def _begin_read(self, index: int, one: RunningRequest, now: float) -> None:
        one.is_reading = True
        self._answer_read(index, one, now)

    def _answer_read(self, index: int, one: RunningRequest, now: float) -> None:
        if one.is_reading and one.delivered > one.sent:
            one.is_reading = False
            self._message(index, self._costs.tokens_message, partial(self._end_read, index, one), now)

    def _end_read(self, index: int, one: RunningRequest, now: float) -> None:
        settings = self._settings
        one.sent = one.delivered
        self._note_sent(index, one, is_last=one.sent >= one.request.output, now=now)
        if one.sent < one.request.output:
            self._push(now + (settings.read_trip or 0.0) + settings.client_overhead, partial(self._read, index, one))

    def _note_sent(self, index: int, one: RunningRequest, *, is_last: bool, now: float) -> None:
        """Note that tokens of a text were sent."""
        if not one.has_first:
            one.first = now
            one.has_first = True
        if is_last:
            one.end = now
            self._replicas[index].load -= 1
            self._done.append(one)

    # steps

    def _step(self, index: int, now: float) -> None:
        """Begin a step if the replica is idle and has work."""
        replica = self._replicas[index]
        settings = self._settings
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
        replica.is_stepping = True
        self._steps += 1
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

    def _pass(self, index: int, step: FleetStep, finish: Action, now: float) -> None:
        seconds = self._curve.seconds(step.batch, step.rows, step.prefix, prompt_rows=step.prompt_rows)
        seconds += self._drafting(step.deciding)
        launch = self._costs.launching(len(step.deciding), step.rows)
        if self._settings.passes_on_host:
            self._work(index, seconds, finish, now)
        elif launch > 0:
            self._work(index, launch, lambda done: self._push(max(done, now + seconds), finish), now)
        else:
            self._push(now + seconds, finish)

    def _drafting(self, deciding: Sequence[RunningRequest]) -> float:
        """Return the seconds of drafting for all sequences of a step."""
        if self._settings.round_trip is not None or not deciding:
            return 0.0
        each = [one.outcome.draft_seconds for one in deciding]
        return max(each) + self._costs.draft_share * (sum(each) - max(each))

    def _end_step(self, index: int, step: FleetStep, begun: float, now: float) -> None:
        replica = self._replicas[index]
        settings = self._settings
        costs = self._costs
        replica.is_stepping = False
        replica.ended = now
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

    def _end_verdict(self, index: int, one: RunningRequest, now: float) -> None:
        self._note_sent(index, one, is_last=one.is_written, now=now)
        if not one.is_written:
            self._draft(index, one, now)

    def _deliver(self, index: int, one: RunningRequest, written: int, now: float) -> None:
        one.delivered = written
        self._answer_read(index, one, now)
