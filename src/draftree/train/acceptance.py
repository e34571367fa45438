"""Probability that the rule `coupled` accepts a draft, in closed form and differentiable.

With one Gumbel noise g for both models, the target picks argmax(log p + g) and the drafter proposes argmax(log q + g).
Both are equal with probability

    J(p, q) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)

(the Gumbel coupling, arXiv 2408.07978). Sorted by r = q / p, with A_i = sum of p_j over r_j <= r_i and B_i = sum of q_j
over r_j > r_i, this is sum_i p_i q_i / (A_i q_i + B_i p_i). Tokens that the drafter cannot propose have q = 0, so their
mass is a part of every A_i. At least (1 - TV) / (1 + TV) and at most 1 - TV.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["LEAST_LOG", "condensed", "coupled_acceptance", "overlap"]

LEAST_LOG = -69.0
"""Lower bound of log-probabilities (1e-30): a product of two stays a normal number in double precision."""
LEAST_REST = 1e-9
"""Lower bound of the mass of condensed tokens; smaller differences are rounding."""


def coupled_acceptance(log_p: Tensor, log_q: Tensor, log_outside: Tensor | None = None) -> Tensor:
    """Return the probability that target and drafter choose the same token under shared Gumbel noise.

    Computed in double precision: in single precision, gradients of rare tokens are NaN.

    Args:
        log_p: log-probabilities of the target on the draft vocabulary, shape (..., tokens); not renormalised.
        log_q: log-probabilities of the drafter, same shape.
        log_outside: log of the target's mass outside the draft vocabulary, shape (...); None for none.

    Returns:
        Shape (...), float64.
    """
    log_p, log_q = (value.double().clamp_min(LEAST_LOG) for value in (log_p, log_q))
    order = (log_q - log_p).argsort(dim=-1)
    p, q = log_p.gather(-1, order).exp(), log_q.gather(-1, order).exp()
    lower = p.cumsum(dim=-1)
    if log_outside is not None:
        lower = lower + log_outside.double().exp().unsqueeze(-1)
    # the sum above each token without the token itself; a difference of sums would lose the small ones
    upper = pad(q.flip(-1).cumsum(dim=-1).flip(-1)[..., 1:], (0, 1))
    return (p * q / (lower * q + upper * p)).sum(dim=-1)


def condensed(log_p: Tensor, log_q: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens of either distribution, and all others as one token at the end.

    The acceptance of the result is too high by at most the smaller mass of the others. Sorting a few hundred columns
    instead of a vocabulary is several times as fast.

    Args:
        log_p: log-probabilities of the target on the draft vocabulary, shape (..., tokens).
        log_q: log-probabilities of the drafter, same shape; sums to 1.
        count: number of tokens that are kept.

    Returns:
        Both, shape (..., count + 1), float64; unchanged if there are no more tokens than `count`.
    """
    if log_p.shape[-1] <= count:
        return log_p, log_q
    chosen = torch.maximum(log_p, log_q).detach().topk(count, dim=-1, sorted=False).indices
    inside_p, inside_q = log_p.gather(-1, chosen).double(), log_q.gather(-1, chosen).double()
    rest_p = log_p.double().exp().sum(dim=-1, keepdim=True) - inside_p.exp().sum(dim=-1, keepdim=True)
    rest_q = 1 - inside_q.exp().sum(dim=-1, keepdim=True)
    rests = (rest.clamp_min(LEAST_REST).log() for rest in (rest_p, rest_q))
    found_p, found_q = (torch.cat(pair, dim=-1) for pair in zip((inside_p, inside_q), rests, strict=True))
    return found_p, found_q


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_i min(p_i, q_i) = 1 - TV: the acceptance of rejection sampling.

    Args:
        log_p: log-probabilities of the target on the draft vocabulary, shape (..., tokens); not renormalised.
        log_q: log-probabilities of the drafter, same shape.

    Returns:
        Shape (...), in the dtype of the arguments.
    """
    return torch.minimum(log_p, log_q).exp().sum(dim=-1)
