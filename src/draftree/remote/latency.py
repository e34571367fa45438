"""Times and bytes of a connection: round-trip time, costs for planners, and the comparison with plain streaming.

A round takes the device's draft, the round trip, the server's queue and its pass. The server reports queue and pass, so
the round trip follows without synchronized clocks. Costs use the 70th percentile of the round trip: with jitter the
mean is too small to plan with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Latency", "percentile", "streaming_seconds"]

WINDOW = 50
"""Rounds of which estimates are made."""
PLANNED = 0.7
"""Percentile of the round trip in costs."""
MARGIN = 0.95
"""Streaming is recommended if it takes less than this share of the time per token."""
MIN_ROUNDS = 8
"""Rounds before a recommendation."""


def percentile(values: list[float], share: float) -> float:
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
    """Counts and recent times of one connection, in seconds. Mutated by the client.

    Attributes:
        pass_seconds: the server's passes by rows, as it measured them.
        rounds: verified rounds.
        tokens: tokens that they returned.
        streamed: tokens that the server wrote alone.
        bytes_up: bytes of frames of these rounds and reads, sent.
        bytes_down: the same, received.
        reconnects: connections after the first.
        reopened: texts that were opened again: the server had lost them, or they need more room.
        seconds: time of verified rounds, drafting included.
        prompt_bytes: bytes of hidden states of prompts, sent.
        can_stream: whether the server could write and stream texts alone.
    """

    pass_seconds: dict[int, float] = field(default_factory=dict)
    rounds: int = 0
    tokens: int = 0
    streamed: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    reconnects: int = 0
    reopened: int = 0
    seconds: float = 0.0
    prompt_bytes: int = 0
    can_stream: bool = True
    _trips: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _queues: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _passes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def note_trip(self, seconds: float) -> None:
        """Note a request that the server answers at once, such as the greeting."""
        self._trips.append(seconds)

    def note_round(self, seconds: float, *, queue: float, passed: float, texts: int, tokens: int) -> None:
        """Note a verified round.

        Args:
            seconds: from sending the drafts to the verdicts.
            queue: of these, seconds before the server's pass.
            passed: of these, seconds of the pass.
            texts: texts of the round.
            tokens: tokens that all texts gained.
        """
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

    def costs(self) -> dict[int, float]:
        """Return seconds of a round without its draft, by rows: round trip, queue and the server's pass."""
        fixed = percentile(list(self._trips), PLANNED) + percentile(list(self._queues), PLANNED)
        return {rows: fixed + seconds for rows, seconds in self.pass_seconds.items()}

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
