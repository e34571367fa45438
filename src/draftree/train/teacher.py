"""The target's rows as training reads them: on the draft vocabulary, or the most likely tokens with the rest as one."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from draftree.train.acceptance import LEAST_LOG
from draftree.train.losses import Rows

__all__ = ["FullTeacher", "Teacher", "TopTeacher"]


class Teacher(Protocol):
    """Distributions of the target for some positions."""

    def rows(self, logits: Tensor) -> Rows:
        """Return these distributions beside the drafter's.

        Args:
            logits: of the drafter, shape (rows, draft vocabulary).
        """

    def part(self, rows: Tensor | slice) -> Teacher:
        """Return the distributions of some of the rows."""


class FullTeacher:
    """Logits of the target on the draft vocabulary.

    Args:
        log_p: log-probabilities of the target on the draft vocabulary, shape (rows, draft vocabulary), float32.
        log_outside: log of the mass outside, shape (rows,).
        temperature: divisor of the drafter's logits; the target's were divided already.
    """

    __slots__ = ("_log_outside", "_log_p", "_temperature")

    def __init__(self, log_p: Tensor, log_outside: Tensor, temperature: float = 1.0) -> None:
        self._log_p, self._log_outside, self._temperature = log_p, log_outside, temperature

    @classmethod
    def from_logits(cls, logits: Tensor, outside: Tensor, temperature: float = 1.0) -> FullTeacher:
        """Return the teacher of logits on the draft vocabulary.

        Args:
            logits: of the target over the temperature, shape (rows, draft vocabulary).
            outside: log of the sum of exponentials of its other logits over the temperature, shape (rows,).
            temperature: see the class.
        """
        total = torch.logaddexp(logits.logsumexp(dim=-1), outside)
        log_p = (logits - total[:, None]).clamp_min(LEAST_LOG)
        return cls(log_p, (outside - total).clamp_min(LEAST_LOG), temperature)

    def rows(self, logits: Tensor) -> Rows:
        """Return the distributions beside the drafter's, one column for each token of the draft vocabulary."""
        return Rows(self._log_p, torch.log_softmax(logits / self._temperature, dim=-1), self._log_outside)

    def part(self, rows: Tensor | slice) -> FullTeacher:
        """Return the distributions of some of the rows."""
        return FullTeacher(self._log_p[rows], self._log_outside[rows], self._temperature)


class TopTeacher:
    """The target's most likely tokens. All other tokens are one column, which hides differences among them.

    Args:
        draft_ids: rows of the draft vocabulary of the most likely tokens, shape (rows, k); -1 for tokens outside it.
        log_p: their log-probabilities, same shape.
        temperature: divisor of the drafter's logits.
    """

    __slots__ = ("_draft_ids", "_log_p", "_temperature")

    def __init__(self, draft_ids: Tensor, log_p: Tensor, temperature: float = 1.0) -> None:
        self._draft_ids, self._log_p, self._temperature = draft_ids, log_p, temperature

    def rows(self, logits: Tensor) -> Rows:
        """Return the distributions beside the drafter's; columns are the k tokens and the rest."""
        logits = logits / self._temperature
        is_inside = self._draft_ids >= 0
        log_q = logits.gather(-1, self._draft_ids.clamp_min(0)) - logits.logsumexp(dim=-1, keepdim=True)
        log_q = torch.where(is_inside, log_q, LEAST_LOG)
        log_p = torch.where(is_inside, self._log_p, LEAST_LOG)
        rest_q = _log_complement(log_q)
        rest_p = _log_complement(self._log_p)
        outside = torch.where(is_inside, -math.inf, self._log_p).logsumexp(dim=-1).clamp_min(LEAST_LOG)
        return Rows(torch.cat((log_p, rest_p), dim=-1), torch.cat((log_q, rest_q), dim=-1), outside)

    def part(self, rows: Tensor | slice) -> TopTeacher:
        """Return the distributions of some of the rows."""
        return TopTeacher(self._draft_ids[rows], self._log_p[rows], self._temperature)


def _log_complement(log_probs: Tensor) -> Tensor:
    """Return log(1 - sum of probabilities), shape (rows, 1), bounded from below."""
    mass = log_probs.double().exp().sum(dim=-1, keepdim=True)
    return (1 - mass).clamp_min(1e-9).log().to(log_probs.dtype)
