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

import contextlib
import heapq
import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import final

from draftree.engine.client_drafts import longest_wait
from draftree.engine.scheduler import prefill_budget, split_prefill_budget
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
    outcomes: dict[str, list[RoundOutcome]] = defaultdict(list)
    for traced in trace.rounds:
        draft_seconds = traced.seconds["draft"] / max(1, len(traced.steps))
        for step in traced.steps:
            nodes = len(step.tree) if step.kept is None else len(step.kept)
            outcomes[step.sequence].append(RoundOutcome(nodes, step.num_written, draft_seconds))
    return {name: tuple(rounds) for name, rounds in outcomes.items()}


def mean_outcomes(tokens_per_round: float, nodes: int, draft_seconds: float = 0.0) -> tuple[RoundOutcome, ...]:
    """Return outcomes with a mean of `tokens_per_round` (from 1 to `nodes` + 1), in an even order."""
    written = 0
    outcomes = []
    for index in range(1, 21):
        due = round(index * tokens_per_round)
        outcomes.append(RoundOutcome(nodes, max(1, due - written), draft_seconds))
        written = max(written + 1, due)
    return tuple(outcomes)


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
"""Called with a completion time."""
Wait = Callable[[Action], None]
"""Begins something that calls the action when it ends."""
Process = Generator[Wait, float, None]
"""Waits for one thing after another; each gives the time at which it ended."""
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
        by_sequence = self.overhead + self.overhead_per_sequence * sequences
        return by_sequence + self.overhead_per_tree * trees + self.overhead_per_row * rows

    def launching(self, sequences: int, rows: int) -> float:
        """Return the seconds of the engine for a pass while it runs elsewhere."""
        return self.launch + self.launch_per_sequence * sequences + self.launch_per_row * rows

    def times(self, factor: float) -> HostCosts:
        """Return the costs of a host that takes so many times as long; shares stay."""
        return replace(self, **{name: factor * value for name, value in asdict(self).items() if name not in SHARES})


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
        actions = list[Action]()
        while self._messages and self._messages[0][0] - self._given <= DONE:
            actions.append(heapq.heappop(self._messages)[2])
            self._idle_since = now
        if self._engine is not None and self._engine[0] <= DONE:
            actions.append(self._engine[1])
            self._engine = None
        return actions

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
        first: when its first tokens were there, for its client; NaN before.
        end: when its last tokens were there.
        queued: whether it waited for a place in the batch.
        arrived: when it, or its last tree, arrived at the engine.
        left: when its last verdict was known, while its client has not sent the next tree; None else.
        away: seconds between its last verdict and the tree after it; None before that.
        delivered: tokens that the event loop has.
        wake: continues its client, which waits for a verdict or for tokens; None if it does not.
    """

    request: SimulatedRequest
    unread: int
    written: int = 0
    rounds: int = 0
    first: float = math.nan
    end: float = 0.0
    queued: bool = False
    arrived: float = 0.0
    left: float | None = None
    away: float | None = None
    delivered: int = 0
    wake: Action | None = None

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

    def sleep(self, wake: Action) -> None:
        self.wake = wake

    def notify(self, now: float) -> None:
        """Continue the client if it waits."""
        if (wake := self.wake) is not None:
            self.wake = None
            wake(now)


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


@dataclass(slots=True, eq=False)
class Replica:
    """An engine. Mutated by `Fleet`.

    Attributes:
        load: requests whose tokens were not all sent.
        ended: when its last step ended.
        is_changed: whether it may begin a step.
        version: of the next end of a work of the host: earlier ones do not count.
    """

    host: Host
    waiting: list[RunningRequest] = field(default_factory=list)
    running: list[RunningRequest] = field(default_factory=list)
    away: list[RunningRequest] = field(default_factory=list)
    load: int = 0
    busy: float = 0.0
    is_stepping: bool = False
    is_changed: bool = False
    ended: float = 0.0
    version: int = 0

    def register(self, sequence: RunningRequest, now: float) -> None:
        """Let a sequence take part in the next step: it is new, or its tree has arrived."""
        sequence.arrived = now
        if sequence.left is None:
            self.waiting.append(sequence)
        else:
            sequence.away = now - sequence.left
            sequence.left = None
            self.away.remove(sequence)
            self.running.append(sequence)
        self.is_changed = True

    def admit(self, max_batch: int) -> None:
        """Move waiting sequences into the batch while it has places."""
        while self.waiting and len(self.running) + len(self.away) < max_batch:
            self.running.append(self.waiting.pop(0))
        for sequence in self.waiting:
            sequence.queued = True

    def patient_until(self, fixed: float) -> float | None:
        """Return until when the next step waits for trees, as the engine does (`longest_wait`); None if it does not.

        `fixed` is the seconds of a pass over one row.
        """
        if self.waiting:
            return None
        first = min(sequence.arrived for sequence in self.running)
        since = (first, max(first, self.ended))
        ends = [longest_wait(*since, client.due, client.away, fixed) for client in self.away]
        return max((end for end in ends if end is not None), default=None)

    def next_step(self, prefill_busy: int) -> FleetStep | None:
        """Read the next parts of prompts, and return the step; None if there is nothing to do."""
        rows = prompt_rows = 0
        reading = [sequence for sequence in self.running if not sequence.written]
        budget = prefill_budget(len(reading), len(self.running) - len(reading), prefill_busy)
        shares = split_prefill_budget([sequence.unread for sequence in reading], budget)
        for sequence, share in zip(reading, shares, strict=True):
            sequence.unread -= share
            rows += share
            prompt_rows += share - (0 if sequence.unread else min(1, share))  # the root of a first tree ends its prompt
        deciding = [sequence for sequence in self.running if sequence.written or not sequence.unread]
        rows += sum(sequence.outcome.nodes + bool(sequence.written) for sequence in deciding)
        if not rows:
            return None
        batch = sum(bool(each.written) or each.unread < each.request.prompt for each in self.running)
        prefix = statistics.fmean(each.request.prompt - each.unread + each.written for each in self.running)
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
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self._replicas = [Replica(Host(settings.host.wake_up)) for _ in range(settings.replicas)]
        self._done: list[RunningRequest] = []
        self._steps = 0
        self._delays = random.Random(settings.seed)

    def run(self, requests: Iterable[SimulatedRequest]) -> FleetResult:
        sequences = [RunningRequest(request, request.prompt) for request in requests]
        for sequence in sequences:
            self._begin(self._client(sequence))
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:  # what happens at once shares a step
                heapq.heappop(self._events)[2](now)
            for replica in self._replicas:
                if replica.is_changed:
                    replica.is_changed = False
                    self._begin(self._step(replica, now))
        first = min((sequence.request.arrival for sequence in sequences), default=0.0)
        spent = max((sequence.end for sequence in sequences), default=first) - first
        done = self._done
        return FleetResult(
            seconds=spent,
            tokens=sum(sequence.written for sequence in done),
            first_token=tuple(sequence.first - sequence.request.arrival for sequence in done),
            per_token=tuple((sequence.end - sequence.first) / max(1, sequence.written - 1) for sequence in done),
            busy=statistics.fmean(replica.busy for replica in self._replicas) / spent if spent else 0.0,
            queued=sum(sequence.queued for sequence in done) / max(1, len(done)),
            steps=self._steps,
            by_request=tuple(sequence.end - sequence.request.arrival for sequence in sequences),
        )

    def _begin(self, process: Process) -> None:
        def advance(now: float | None) -> None:
            """Continue the process to its next wait."""
            with contextlib.suppress(StopIteration):
                process.send(now)(advance)  # type: ignore[arg-type]

        advance(None)

    def _push(self, when: float, action: Action) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def _until(self, when: float) -> Wait:
        return partial(self._push, when)

    def _message(self, replica: Replica, seconds: float, now: float, action: Action) -> None:
        """Do the work of a message on a server, then the action."""
        if seconds > 0:
            replica.host.add(now, seconds, action)
            self._follow_host(replica)
        else:
            action(now)

    def _work(self, replica: Replica, seconds: float, now: float, action: Action) -> None:
        """Do a work of the engine of a server, then the action."""
        replica.host.begin(now, seconds, action)
        self._follow_host(replica)

    def _follow_host(self, replica: Replica) -> None:
        """Make the next end of a work of the host an event, in place of the one before."""
        replica.version += 1
        if (end := replica.host.next_end) is not None:
            self._push(end, partial(self._end_work, replica, replica.version))

    def _end_work(self, replica: Replica, version: int, now: float) -> None:
        if version == replica.version:
            for action in replica.host.take_ended(now):
                action(now)
            self._follow_host(replica)

    def _client(self, sequence: RunningRequest) -> Process:
        """Send a request to the replica with the least load, and its trees or reads after it."""
        settings = self._settings
        costs = self._settings.host
        now = yield self._until(sequence.request.arrival)
        replica = min(self._replicas, key=lambda each: each.load)
        replica.load += 1
        if settings.opens:
            now = yield partial(self._message, replica, costs.opening, now)
        if settings.round_trip is None:
            replica.register(sequence, now)
            if settings.opens and settings.read_trip is not None:
                yield from self._read(sequence, replica, now)
            return
        is_sent = not settings.opens  # the first tree opens the text
        while not sequence.is_written:
            if not is_sent:
                away = settings.round_trip + settings.client_overhead + sequence.outcome.draft_seconds
                now = yield self._until(now + away + settings.jitter * self._delays.random())
            now = yield partial(self._message, replica, costs.tree_message, now)
            replica.register(sequence, now)
            now = yield sequence.sleep
            now = yield partial(self._message, replica, costs.verdict_message, now)
            self._note_sent(sequence, replica, sequence.written, now)
            is_sent = False

    def _read(self, sequence: RunningRequest, replica: Replica, now: float) -> Process:
        """Ask for tokens after every answer; the server answers when it has some."""
        settings = self._settings
        costs = self._settings.host
        sent = 0
        while sent < sequence.request.output:
            now = yield self._until(now + (settings.read_trip or 0.0) + settings.client_overhead)
            now = yield partial(self._message, replica, costs.read_message, now)
            while sequence.delivered <= sent:
                now = yield sequence.sleep
            now = yield partial(self._message, replica, costs.tokens_message, now)
            sent = sequence.delivered
            self._note_sent(sequence, replica, sent, now)

    def _deliver(self, sequence: RunningRequest, written: int, now: float) -> None:
        sequence.delivered = written
        sequence.notify(now)

    def _note_sent(self, sequence: RunningRequest, replica: Replica, sent: int, now: float) -> None:
        """Note that a text was sent up to this many tokens."""
        if math.isnan(sequence.first):
            sequence.first = now
        if sent >= sequence.request.output:
            sequence.end = now
            replica.load -= 1
            self._done.append(sequence)

    def _step(self, replica: Replica, now: float) -> Process:
        """Run a step if the replica is idle and has work: host, pass, and host again."""
        settings = self._settings
        costs = self._settings.host
        if replica.is_stepping:
            return
        replica.admit(settings.max_batch)
        if not replica.running:
            return
        if settings.gathers:
            known = settings.known_pass
            fixed = self._curve.seconds(1, 1, replica.running[0].request.prompt) if known is None else known
            until = replica.patient_until(fixed)
            if until is not None and until > now:
                yield self._until(until)  # unless a tree begins the step before
                replica.is_changed = True
                return
        step = replica.next_step(settings.prefill_busy)
        if step is None:
            return
        replica.is_stepping = True
        self._steps += 1
        begun = now
        drafts = settings.round_trip is not None
        beside = costs.step(len(step.deciding), trees=len(step.deciding) if drafts else 0, rows=step.rows)
        beside += costs.prompt_step if step.prompt_rows else 0.0
        after = costs.after * beside
        now = yield partial(self._work, replica, beside - after, now)
        seconds = self._curve.seconds(step.batch, step.rows, step.prefix, prompt_rows=step.prompt_rows)
        if step.deciding and not drafts:
            each = [sequence.outcome.draft_seconds for sequence in step.deciding]
            seconds += max(each) + costs.draft_share * (sum(each) - max(each))
        launch = costs.launching(len(step.deciding), step.rows)
        if settings.passes_on_host:
            now = yield partial(self._work, replica, seconds, now)
        else:
            launched = (yield partial(self._work, replica, launch, now)) if launch > 0 else now
            now = yield self._until(max(launched, now + seconds))
        now = yield partial(self._work, replica, after, now)
        replica.is_stepping = False
        replica.is_changed = True
        replica.ended = now
        replica.busy += now - begun
        for sequence in step.deciding:
            sequence.written = min(sequence.request.output, sequence.written + sequence.outcome.tokens)
            sequence.rounds += 1
        leaving = {sequence for sequence in step.deciding if sequence.is_written or drafts}
        replica.running = [sequence for sequence in replica.running if sequence not in leaving]
        for sequence in step.deciding:
            if drafts:
                if not sequence.is_written:
                    sequence.left = now
                    replica.away.append(sequence)
                sequence.notify(now)
            elif settings.read_trip is not None:
                self._message(replica, costs.update, now, partial(self._deliver, sequence, sequence.written))
            else:
                self._note_sent(sequence, replica, sequence.written, now)
