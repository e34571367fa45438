"""Results of a simulated fleet, and their quantiles. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FleetResult", "quantile"]


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
