"""The memory of a watcher: the last status, rates over time, and the last rounds. Safe for two threads."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

from draftree.cli.watching.facts import PHASES, RoundFacts, ServerFacts

__all__ = ["History", "Snapshot"]

RATES, ROUNDS = 60, 200
"""Remembered rates of a model, and rounds of all models."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of the view at one time.

    Attributes:
        server: the last status; None before the first.
        rates: tokens per second of every model at the last polls, the oldest first.
        rounds: the last rounds, the oldest first.
        trouble: why the server cannot be read now; empty if it can.
    """

    server: ServerFacts | None
    rates: dict[str, list[float]]
    rounds: list[RoundFacts]
    trouble: str

    @property
    def phase_shares(self) -> dict[str, float]:
        """Shares of the phases in the time of the rounds, from 0 to 1; all zero without rounds."""
        sums = {phase: sum(one.seconds[phase] for one in self.rounds) for phase in PHASES}
        total = sum(sums.values())
        return {phase: share / total if total else 0.0 for phase, share in sums.items()}


class History:
    """Collects reports. Mutated by its methods, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ServerFacts | None = None
        self._rates: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RATES))
        self._rounds: deque[RoundFacts] = deque(maxlen=ROUNDS)
        self._trouble = ""

    def add_status(self, server: ServerFacts) -> None:
        """Remember a status; models that are gone are forgotten."""
        with self._lock:
            self._server, self._trouble = server, ""
            for name in set(self._rates) - {model.name for model in server.models}:
                del self._rates[name]
            for model in server.models:
                self._rates[model.name].append(model.tokens_per_second or 0.0)

    def add_round(self, done: RoundFacts) -> None:
        """Remember a round."""
        with self._lock:
            self._rounds.append(done)

    def set_trouble(self, text: str) -> None:
        """Remember why the server cannot be read now."""
        with self._lock:
            self._trouble = text

    def snapshot(self) -> Snapshot:
        """Return what is known now."""
        with self._lock:
            rates = {name: list(values) for name, values in self._rates.items()}
            return Snapshot(self._server, rates, list(self._rounds), self._trouble)
