"""Finished hypotheses of a search: scores by length, the pool, and the rules that end a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftree.beam.params import BeamSearchParams
from draftree.beam.result import Hypothesis


@dataclass(frozen=True, slots=True)
class LengthScore:
    """Score of a hypothesis: its cumulative log-probability over length**penalty.

    Attributes:
        penalty: exponent; 0 ranks by the sum.
        basis: tokens that count, as `BeamSearchParams.length_basis`.
        prompt_length: number of prompt tokens.
    """

    penalty: float
    basis: str
    prompt_length: int

    def length(self, num_tokens: int, *, has_end: bool) -> int:
        """Return the length of a hypothesis of `num_tokens` generated tokens, at least 1."""
        if self.basis == "generated":
            return max(1, num_tokens)
        shown = num_tokens - has_end
        return max(1, shown + (self.prompt_length if self.basis == "prompt_and_generated" else 0))

    def score(self, total: float, num_tokens: int, *, has_end: bool) -> float:
        """Return the score."""
        return total if total == 0.0 else float(total / self.length(num_tokens, has_end=has_end) ** self.penalty)


def coverage(attention: Sequence[np.ndarray]) -> float:
    """Return the logarithm of the attention that each position of the source got, up to 1 each; the sum of all.

    Positions without any attention are left out, as in CTranslate2. Source: arXiv 1609.08144, equation 14.

    Args:
        attention: weights for each token, shape (source length,).
    """
    total = np.stack(attention).sum(axis=0, dtype=np.float64)
    return float(np.log(np.minimum(total[total > 0], 1.0)).sum())


@dataclass(slots=True)
class Pool:
    """The finished hypotheses of a search, best first.

    Args:
        params: size, rules and penalties.
        width: beams of the search, or of its group.
        limit: maximum number of generated tokens.
        lengths: the score.
    """

    params: BeamSearchParams
    width: int
    limit: int
    lengths: LengthScore
    hypotheses: list[Hypothesis] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of hypotheses that are kept."""
        if self.params.early_stopping == "fcfs":
            return max(1, round(self.width * self.params.patience))
        return self.width

    @property
    def is_full(self) -> bool:
        """Whether as many hypotheses as are kept have finished."""
        return len(self.hypotheses) >= self.size

    def add(self, hypothesis: Hypothesis) -> None:
        """Add a hypothesis. If the pool is full, the worst is dropped, or with "fcfs" the new one."""
        if self.is_full and self.params.early_stopping == "fcfs":
            return
        place = len(self.hypotheses)
        while place and self._rank(hypothesis) > self._rank(self.hypotheses[place - 1]):
            place -= 1
        self.hypotheses.insert(place, hypothesis)
        del self.hypotheses[self.size :]

    @staticmethod
    def _rank(hypothesis: Hypothesis) -> tuple[bool, float]:
        return hypothesis.constraints_met, hypothesis.score

    def is_final(self, best_total: float, num_tokens: int) -> bool:
        """Whether the search ends by its stop rule.

        Args:
            best_total: highest cumulative log-probability of the live beams.
            num_tokens: their generated tokens.
        """
        if not self.is_full:
            return False
        rule = self.params.early_stopping
        if rule in (True, "fcfs"):
            return True
        if rule == "never" and self.params.increments_may_be_positive:
            return False
        longest = rule == "never" and self.params.length_penalty > 0
        bound = self.lengths.score(best_total, self.limit if longest else num_tokens, has_end=False)
        return not bound > self.hypotheses[-1].score
