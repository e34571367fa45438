"""The server's reports as typed values; absent or malformed values become None, zero or an empty text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import harmless

__all__ = ["PHASES", "ModelFacts", "RoundFacts", "RowFacts", "ServerFacts"]

PHASES = ("plan", "draft", "score", "verify", "commit")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts and recent rates of a model.

    Attributes:
        name: its name.
        drafts: names of its drafters.
        running: running sequences.
        waiting: waiting sequences.
        tokens_per_second: tokens written per second, all sequences together.
        acceptance_length: tokens written per round and sequence; None without rounds.
        acceptance_rate: accepted share of drafted tokens, from 0 to 1; None without drafts.
        kernels: kernels of its passes.
        dtype: dtype of its weights.
        explain: the planner's reason; empty for none.
    """

    name: str
    drafts: tuple[str, ...]
    running: int
    waiting: int
    tokens_per_second: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    kernels: str
    dtype: str
    explain: str

    @classmethod
    def of(cls, values: Any) -> ModelFacts:
        """Read an entry of the status."""
        given = mapping(values)
        drafts = given.get("drafts")
        return cls(
            text(given, "name"),
            tuple(harmless(str(draft)) for draft in drafts) if isinstance(drafts, list) else (),
            count(given, "running"),
            count(given, "waiting"),
            number(given, "tokens_per_second"),
            number(given, "acceptance_length"),
            number(given, "acceptance_rate"),
            text(given, "kernels"),
            text(given, "dtype"),
            text(given, "explain"),
        )


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The state of a server.

    Attributes:
        models: its models.
        queue: counts of the queue and its limits, by name; None for no limit.
        uptime_seconds: time since its start; None if it is not reported.
        version: version of Draftree.
    """

    models: tuple[ModelFacts, ...]
    queue: Mapping[str, float | None]
    uptime_seconds: float | None
    version: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ServerFacts:
        """Read the status."""
        models, queue = values.get("models"), mapping(values.get("queue"))
        return cls(
            tuple(ModelFacts.of(model) for model in models) if isinstance(models, list) else (),
            {harmless(str(name)): number(queue, name) for name in queue},
            number(values, "uptime_seconds"),
            text(values, "version"),
        )


@dataclass(frozen=True, slots=True)
class RowFacts:
    """One sequence in a round: drafted, accepted and written tokens."""

    num_drafted: int
    num_accepted: int
    num_written: int


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """One round.

    Attributes:
        model: name of the model.
        seconds: seconds by phase.
        total_seconds: seconds of the whole round.
        rows: its sequences.
    """

    model: str
    seconds: Mapping[str, float]
    total_seconds: float
    rows: tuple[RowFacts, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RoundFacts:
        """Read an event of the stream."""
        seconds, rows = mapping(values.get("seconds")), values.get("sequences")
        phases = {phase: number(seconds, phase) or 0.0 for phase in PHASES}
        found = [mapping(row) for row in rows] if isinstance(rows, list) else []
        return cls(
            text(values, "model"),
            phases,
            number(seconds, "total") or sum(phases.values()),
            tuple(RowFacts(count(r, "num_drafted"), count(r, "num_accepted"), count(r, "num_written")) for r in found),
        )


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def text(values: Mapping[str, Any], name: str) -> str:
    """Return a text in one line that is safe to show."""
    found = values.get(name)
    return " ".join(harmless(found).split()) if isinstance(found, str) else ""


def number(values: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number."""
    found = values.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return found


def count(values: Mapping[str, Any], name: str) -> int:
    """Return a number that is not negative."""
    return max(0, int(number(values, name) or 0))
