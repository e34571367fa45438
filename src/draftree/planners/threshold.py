"""Stops drafting after the first token whose probability under the drafter is below a threshold.

The token itself is kept: dropping it would bias verifiers that use the draft distribution. The maximum is `k` tokens,
or the drafter's depth. Drafters that copy text estimate the probability from their matches (`ngram` from the length of
the match, `suffix` and `prediction` from counts); a drafter without such an estimate is refused.

Source: dynamic speculation length, as `assistant_confidence_threshold` in transformers (default there: 0.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.core.types import Budget
from draftree.planners.base import Planner, check_length


@final
class ThresholdPlanner(Planner[None]):
    """Planner that stops drafts at low confidence."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`threshold:0.4`: confidence below which drafting stops; `k`: maximum number of tokens."""

        confidence: float = field(default=0.4, metadata={"argument": True})
        k: int | None = field(default=None, metadata={"limits": "depth"})

        def __post_init__(self) -> None:
            if not 0 <= self.confidence <= 1:
                raise ConfigurationError(f"planner 'threshold' has {self.confidence}: it must be from 0 to 1")
            check_length("threshold", "k", self.k)

    @property
    def needs_confidence(self) -> bool:
        """Whether budgets have a minimum confidence: not with threshold 0."""
        return bool(self.config.confidence > 0)

    def open(self, *, is_sampled: bool = False) -> None:
        """Return no state."""

    def budgets(self, states: Sequence[None]) -> list[Budget]:
        """Return budgets of depth k with the threshold as minimum confidence."""
        k = self.default_depth if self.config.k is None else self.config.k
        return [self.ahead(k, min_confidence=self.config.confidence) for _ in states]
