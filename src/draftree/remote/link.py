"""The client's end of a session: numbered requests, repeated over new connections until they are answered."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar, final

from draftree.core.errors import ConfigurationError, GenerationError, InvalidRequestError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.remote.address import (
    ConnectionLostError,
    FrameError,
    RefusedError,
    RemoteAddress,
    SessionLostError,
    UnreachableError,
)
from draftree.remote.protocol import MAX_REPLY_BYTES, VERSION, decode, encode
from draftree.remote.transport import SILENCE, Transport, open_transport

# Times and bytes of a connection: round-trip time, costs for planners, and the comparison with plain streaming.
#
# A round takes the device's draft, the round trip, the server's queue and its pass. The server reports queue and pass,
# so the round trip follows without synchronized clocks. Costs use the 70th percentile of the round trip: with jitter
# the mean is too small to plan with.

WINDOW = 50  # rounds of which estimates are made
PLANNED = 0.7  # percentile of the round trip in costs
MARGIN = 0.95  # streaming is recommended if it takes less than this share of the time per token
MIN_ROUNDS = 8  # rounds before a recommendation


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of the values lies; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def streaming_seconds(pass_seconds: Mapping[int, float], queue_seconds: float) -> float:
    """Return the seconds per token of a text that the server decodes plainly and streams; 0 if unknown.

    Replies are on the way while the server decodes, so the round trip does not count.
    """
    return pass_seconds[min(pass_seconds)] + queue_seconds if pass_seconds else 0.0


@dataclass(slots=True)
class Latency:
    """Counts and recent times of one connection, in seconds. Mutated by the client."""

    pass_seconds: dict[int, float] = field(default_factory=dict)  # the server's passes by rows, as it measured them
    rounds: int = 0  # verified rounds
    tokens: int = 0  # tokens that they returned
    streamed: int = 0  # tokens that the server wrote alone
    bytes_up: int = 0  # bytes of frames of these rounds and reads, sent
    bytes_down: int = 0  # the same, received
    reconnects: int = 0  # connections after the first
    reopened: int = 0  # texts that were opened again: the server had lost them, or they need more room
    seconds: float = 0.0  # time of verified rounds, drafting included
    prompt_bytes: int = 0  # bytes of hidden states of prompts, sent
    can_stream: bool = True  # whether the server could write and stream texts alone
    _trips: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _queues: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _passes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def note_trip(self, seconds: float) -> None:
        """Note a request that the server answers at once, such as the greeting."""
        self._trips.append(seconds)

    def note_round(self, seconds: float, *, queue: float, passed: float, texts: int, tokens: int) -> None:
        """Note a verified round; `queue` and `passed` are seconds before the server's pass and in it."""
        self._trips.append(max(0.0, seconds - queue - passed))
        self._queues.append(queue)
        self._passes.append(passed)
        self.rounds += texts
        self.tokens += tokens

    @property
    def trip_seconds(self) -> float:
        """Median round-trip time of the last rounds."""
        return median(self._trips) if self._trips else 0.0

    @property
    def queue_seconds(self) -> float:
        """Median time in the server's queue."""
        return median(self._queues) if self._queues else 0.0

    def costs(self, max_rows: int) -> dict[int, float]:
        """Return seconds of a round without its draft, by rows: round trip, queue and the server's pass.

        Without the server's times all passes up to `max_rows` take a round trip.
        """
        fixed = percentile(self._trips, PLANNED) + percentile(self._queues, PLANNED)
        known = {rows: fixed + seconds for rows, seconds in self.pass_seconds.items()}
        return known or dict.fromkeys((1, max_rows), self.trip_seconds)

    @property
    def token_seconds(self) -> float:
        """Seconds per token of the verified rounds, drafting included; 0 before the first."""
        return self.seconds / self.tokens if self.tokens else 0.0

    @property
    def streaming_is_faster(self) -> bool:
        """Whether the server alone would deliver tokens faster than the rounds so far did."""
        alone = streaming_seconds(self.pass_seconds, self.queue_seconds)
        return self.can_stream and self.rounds >= MIN_ROUNDS and 0 < alone < MARGIN * self.token_seconds

    def report(self) -> str:
        """Return one line about the rounds so far; empty before the first."""
        total = self.tokens + self.streamed
        if not total:
            return ""
        parts = [f"round trip {_ms(self.trip_seconds)}, queue {_ms(self.queue_seconds)}"]
        if self.rounds:
            passed = median(self._passes) if self._passes else 0.0
            parts[0] += f", pass {_ms(passed)}"
            parts.append(f"{self.rounds} rounds, {self.tokens / self.rounds:.2f} tokens each")
        parts.append(f"{self.bytes_up / total:.0f} bytes up and {self.bytes_down / total:.0f} down per token")
        if self.reconnects or self.reopened:
            parts.append(f"{self.reconnects} reconnects, {self.reopened} texts opened again")
        if self.streaming_is_faster:
            alone = streaming_seconds(self.pass_seconds, self.queue_seconds)
            parts.append(
                f"{_ms(self.token_seconds)} per token; streaming from the server would take about {_ms(alone)}: "
                "leave the drafter out"
            )
        return "remote: " + "; ".join(parts)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


logger = logging.getLogger(__name__)
T = TypeVar("T")

Connector = Callable[[], Transport]  # opens a connection; raises ConnectionLostError or RefusedError
MAX_REOPENED = 3  # attempts of one pass whose texts the server lost
MAX_STALE = 1000  # late replies in a row after which a connection counts as broken
LOST_CODES = frozenset({"session_lost", "text_lost", "out_of_step"})
"""Codes of errors after which texts must be opened again."""
LEAST_SILENCE = 2.0
MAX_VOCAB = 1 << 24
PINGS = 2  # requests that measure the round trip of a new client


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client waits. Seconds."""

    reply: float = 120.0  # for one reply; it must be longer than the server's longest pass and queue
    total: float = 60.0  # for a server that does not answer or is full, over all attempts
    first: float = 5.0  # for the first reply of all, over all attempts: a wrong address is an error soon
    first_pause: float = 0.05  # before the second attempt; doubled for each further one
    longest_pause: float = 2.0  # between two attempts at most

    @property
    def silence(self) -> float:
        """For a connection, and for the answer to a ping, so that a server that hangs is noticed within `total`."""
        return min(SILENCE, max(LEAST_SILENCE, self.total / 3))


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the server tells a new session."""

    session: str  # token of the session
    model: str  # name of the served model
    vocab_size: int  # tokens of its vocabulary
    context: int  # most tokens of prompt and text
    eos_ids: tuple[int, ...]  # tokens that end a text
    tokenizer: str  # fingerprint of its tokenizer; empty if it has none
    is_exact: bool  # as for `LanguageModel.is_exact`
    supports_trees: bool  # whether drafts may branch
    nodes: int  # most nodes of a text's tree
    texts: int  # most open texts of the session
    lease: float  # seconds without a request after which the session ends
    pass_seconds: Mapping[int, float]  # the server's passes by rows

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Welcome:
        try:
            welcome = cls(
                session=str(message["s"]),
                model=str(message["model"]),
                vocab_size=int(message["vocab"]),
                context=int(message["context"]),
                eos_ids=tuple(int(token) for token in message["eos"]),
                tokenizer=str(message["tokenizer"]),
                is_exact=bool(message["exact"]),
                supports_trees=bool(message["trees"]),
                nodes=int(message["nodes"]),
                texts=int(message["texts"]),
                lease=float(message["lease"]),
                pass_seconds={int(rows): float(seconds) for rows, seconds in message["passes"]},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"the server's greeting cannot be read ({type(error).__name__})") from error
        sizes_are_possible = welcome.context > 1 and welcome.texts > 0 and welcome.nodes >= 0
        if not (0 < welcome.vocab_size <= MAX_VOCAB and sizes_are_possible):
            raise FrameError("the server's greeting has sizes that no model has")
        return welcome


@final
class Link:
    """A session with a verify server. For one thread."""

    def __init__(
        self,
        address: RemoteAddress,
        key: str | None,
        *,
        patience: Patience | None = None,
        connector: Connector | None = None,
        clock: Clock = SYSTEM_CLOCK,
        sleep: Callable[[float], None] = time.sleep,
        takes_bytes: bool = False,
    ) -> None:
        if key is not None and not address.is_private:
            raise ConfigurationError(
                f"the API key would be sent to {address} unencrypted: use https, or a tunnel to this machine"
            )
        self._patience = patience or Patience()
        seconds = {"timeout": self._patience.reply, "silence": self._patience.silence}
        self._connector = connector or (lambda: open_transport(address, key, **seconds))
        self._address, self._clock, self._sleep = address, clock, sleep
        self._takes_bytes = takes_bytes
        self._transport: Transport | None = None
        self._session: str | None = None
        self._number = 0
        self._is_patient, self._must_resume, self._has_answered = True, False, False
        self._counted = (0, 0)
        self.latency = Latency()
        self.welcome = self.begin()

    def begin(self) -> Welcome:
        self._leave()
        welcome = Welcome.read(self._answered({"t": "hello", "v": VERSION, "model": self._address.model}))
        self._session = welcome.session
        if not self.latency.pass_seconds:
            self.latency.pass_seconds = dict(welcome.pass_seconds)
            for _ in range(PINGS):
                start = self._clock()
                self.request({"t": "ping"})
                self.latency.note_trip(self._clock() - start)
        return welcome

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request of the session and return its reply; it is repeated until there is one."""
        self._number += 1
        return self._answered({**message, "id": self._number})

    def retried(self, action: Callable[[], T], reopen: Callable[[], object]) -> T:
        """Run an action, again after all texts were opened again if the server lost them."""
        for attempt in range(1 + MAX_REOPENED):
            try:
                if attempt:
                    reopen()
                return action()
            except SessionLostError as error:
                if attempt == MAX_REOPENED:
                    raise GenerationError(f"the server loses its texts again and again: {error}") from error
        raise AssertionError("the last attempt returns or raises")

    def _answered(self, message: dict[str, Any]) -> dict[str, Any]:
        begin, pause = self._clock(), self._patience.first_pause
        while True:
            try:
                reply = self._once(message)
                self._is_patient = self._has_answered = True
                return reply
            except ConnectionLostError as error:
                reason, wait = str(error), pause
                self._disconnect()
            except RefusedError as error:
                if error.retry_ms is None:
                    raise
                self._has_answered = True
                reason, wait = str(error), max(pause, error.retry_ms / 1000)
                if "id" in message:  # the refusal is the answer to this number
                    self._number += 1
                    message["id"] = self._number
            limit = self._patience.total if self._has_answered else min(self._patience.first, self._patience.total)
            if self._clock() - begin + wait > limit or not self._is_patient:
                self._is_patient = False  # the other texts of a batch need not wait as long
                raise UnreachableError(
                    f"the verify server {self._address} did not answer within {limit:g} s ({reason}): "
                    "check that it runs and can be reached"
                )
            logger.info("verify server %s: %s; next attempt in %.2f s", self._address, reason, wait)
            self._sleep(wait)
            pause = min(2 * pause, self._patience.longest_pause)

    def _once(self, message: Mapping[str, Any]) -> dict[str, Any]:
        transport = self._connected()
        request = dict(message)
        if self._session is not None and (transport.needs_session or self._must_resume):
            request["s"] = self._session
        reply = self._read(transport.exchange(encode(request)))
        self._must_resume = False
        for _ in range(MAX_STALE):
            if reply.get("id") == message.get("id") or reply.get("id") is None:
                return self._checked(reply, message)
            reply = self._read(transport.receive())  # the late reply to an earlier request
        raise ConnectionLostError("the connection repeats replies")

    def _read(self, frame: bytes) -> dict[str, Any]:
        try:
            return decode(frame, max_bytes=MAX_REPLY_BYTES, takes_bytes=self._takes_bytes)
        except FrameError as error:
            raise ConnectionLostError(f"a reply cannot be read: {error}") from error

    def _checked(self, reply: dict[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
        if reply.get("t") != "error":
            return reply
        code, text = str(reply.get("code")), str(reply.get("message"))[:500]
        if code in LOST_CODES:
            raise SessionLostError(text)
        retry = reply.get("retry_ms")
        if isinstance(retry, int):
            raise RefusedError(f"the server is busy: {text}", code=code, retry_ms=retry)
        if reply.get("status") == 400 and message.get("t") in ("open", "verify"):
            raise InvalidRequestError(text, param=reply.get("param"))
        raise RefusedError(f"the server refuses a request: {text}", code=code)

    def _connected(self) -> Transport:
        if self._transport is None:
            self._transport = self._connector()
            self._must_resume = self._session is not None
            self._counted = (0, 0)
            self.latency.reconnects += self._must_resume
        return self._transport

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of frames sent and received since the last call, over this connection."""
        if self._transport is None:
            return 0, 0
        now = (self._transport.bytes_up, self._transport.bytes_down)
        before, self._counted = self._counted, now
        return now[0] - before[0], now[1] - before[1]

    def _disconnect(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def close(self) -> None:
        """End the session, without waiting long for a server that does not answer."""
        if self._transport is not None:
            self._transport.hasten()
        self._leave()
        self._disconnect()

    def _leave(self) -> None:
        """Tell the server that the session is over, if there is a connection."""
        if self._transport is not None and self._session is not None:
            self._number += 1
            # if it fails, the session ends with its lease
            with suppress(ConnectionLostError, RefusedError, SessionLostError, InvalidRequestError):
                self._once({"t": "bye", "id": self._number})
        self._session, self._number = None, 0
