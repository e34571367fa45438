"""The target's rows as training reads them: on the draft vocabulary, or the most likely tokens with the rest as one."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from draftree.train.acceptance import LEAST_LOG
from draftree.train.losses import Rows

__all__ = ["FullTeacher", "LogProbsAt", "Teacher", "TopTeacher"]


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

    def rows(self, logits: Tensor) -> Rows:
        """Return the distributions beside the drafter's, one column for each token of the draft vocabulary."""
        log_q = torch.log_softmax(logits / self._temperature, dim=-1)
        return Rows(self._log_p, log_q, self._log_outside, log_q.detach().amax(dim=-1))

    def part(self, rows: Tensor | slice) -> FullTeacher:
        """Return the distributions of some of the rows."""
        return FullTeacher(self._log_p[rows], self._log_outside[rows], self._temperature)


class TopTeacher:
    """The target's most likely tokens. All other tokens of the draft vocabulary are one column.

    The column hides differences among rare tokens. In return, nothing of the size of the draft vocabulary is kept, and
    losses read a few dozen columns.

    Args:
        draft_ids: rows of the draft vocabulary of the most likely tokens, shape (rows, k); -1 for tokens outside it.
        log_p: their log-probabilities, same shape, float32 or float64.
        log_outside: log of the mass outside the draft vocabulary, shape (rows,); None if `draft_ids` has all of it.
        temperature: divisor of the drafter's logits.
    """

    def __init__(
        self, draft_ids: Tensor, log_p: Tensor, log_outside: Tensor | None = None, temperature: float = 1.0
    ) -> None:
        self._draft_ids, self._log_p, self._log_outside = draft_ids, log_p, log_outside
        self._temperature = temperature

    def rows(self, logits: Tensor) -> Rows:
        """Return the distributions beside the drafter's; columns are the k tokens and the rest."""
        is_inside = self._draft_ids >= 0
        log_q, log_best = LogProbsAt.apply(logits, self._draft_ids.clamp_min(0), self._temperature)
        log_q = torch.where(is_inside, log_q, LEAST_LOG)
        log_p = torch.where(is_inside, self._log_p, LEAST_LOG)
        known = torch.where(is_inside, -math.inf, self._log_p).logsumexp(dim=-1)
        if self._log_outside is None:
            outside, rest_p = known, _log_complement(self._log_p)
        else:
            outside = self._log_outside
            rest_p = _log_complement(torch.cat((log_p, outside[:, None]), dim=-1))
        columns = (torch.cat((log_p, rest_p), dim=-1), torch.cat((log_q, _log_complement(log_q)), dim=-1))
        return Rows(*columns, outside.clamp_min(LEAST_LOG), log_best)

    def part(self, rows: Tensor | slice) -> TopTeacher:
        """Return the distributions of some of the rows."""
        outside = None if self._log_outside is None else self._log_outside[rows]
        return TopTeacher(self._draft_ids[rows], self._log_p[rows], outside, self._temperature)


class LogProbsAt(torch.autograd.Function):
    """Log-probabilities of some tokens: the values of `log_softmax` without a tensor of its size for gradients.

    One pass over the logits forward and one backward; composed operations need about ten.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities.

        Args:
            ctx: of autograd.
            logits: shape (rows, tokens).
            places: tokens of each row, shape (rows, k); a token may be repeated.
            temperature: divisor of the logits.

        Returns:
            Those of the tokens, shape (rows, k), and the largest of each row, shape (rows,), without gradient.
        """
        scaled = logits / temperature if temperature != 1.0 else logits
        total = scaled.logsumexp(dim=-1)
        best = scaled.amax(dim=-1) - total
        found = scaled.gather(-1, places) - total[:, None]
        ctx.save_for_backward(scaled, total, places)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(best)
        return found, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits."""
        scaled, total, places = ctx.saved_tensors
        own = gradients[0] / ctx.temperature
        found = (scaled - total[:, None]).exp_()
        found.mul_(-own.sum(dim=-1, keepdim=True)).scatter_add_(-1, places, own)
        return found, None, None


def _log_complement(log_probs: Tensor) -> Tensor:
    """Return log(1 - sum of probabilities), shape (rows, 1), bounded from below."""
    mass = log_probs.double().exp().sum(dim=-1, keepdim=True)
    return (1 - mass).clamp_min(1e-9).log().to(log_probs.dtype)
