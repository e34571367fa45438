"""Losses of drafters, by name: each maps rows of target and drafter to one number per row.

Divergences use the target's probabilities renormalised on the draft vocabulary, because the drafter cannot propose
other tokens. Acceptance terms use them as they are, because the target may choose other tokens.

Sources: DistillSpec (arXiv 2310.08461) for divergences, LK losses (arXiv 2602.23881), Gumbel coupling
(arXiv 2408.07978) for `coupled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftree.core.errors import ConfigurationError, suggestion

# Probability that the rule `coupled` accepts a draft, in closed form and differentiable.
#
# With one Gumbel noise g for both models, the target picks argmax(log p + g) and the drafter proposes argmax(log q +
# g). Both are equal with probability
#
# J(p, q) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)
#
# (the Gumbel coupling, arXiv 2408.07978). Sorted by r = q / p, with A_i = sum of p_j over r_j <= r_i and B_i = sum of
# q_j over r_j > r_i, this is sum_i p_i q_i / (A_i q_i + B_i p_i). Tokens that the drafter cannot propose have q = 0, so
# their mass is a part of every A_i. At least (1 - TV) / (1 + TV) and at most 1 - TV.

LEAST_LOG = -69.0
"""Lower bound of log-probabilities (1e-30): a product of two stays a normal number in double precision."""
LEAST_REST = 1e-9  # lower bound of the mass of condensed tokens; smaller differences are rounding


def coupled_acceptance(log_p: Tensor, log_q: Tensor, log_outside: Tensor | None = None) -> Tensor:
    """Return the probability that target and drafter choose the same token under shared Gumbel noise.

    Computed in double precision: in single precision, gradients of rare tokens are NaN.

    `log_p`: log-probabilities of the target on the draft vocabulary, shape (..., tokens); not renormalised. `log_q`:
    log-probabilities of the drafter, same shape. `log_outside`: log of the target's mass outside the draft vocabulary,
    shape (...); None for none. Returns shape (...), float64.
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

    Returns both, shape (..., count + 1), float64; unchanged if there are no more tokens than `count`.
    """
    if log_p.shape[-1] <= count:
        return log_p, log_q
    chosen = torch.maximum(log_p, log_q).detach().topk(count, dim=-1, sorted=False).indices
    inside_p, inside_q = log_p.gather(-1, chosen).double(), log_q.gather(-1, chosen).double()
    rest_p = log_p.double().exp().sum(dim=-1, keepdim=True) - inside_p.exp().sum(dim=-1, keepdim=True)
    rest_q = 1 - inside_q.exp().sum(dim=-1, keepdim=True)
    rest_p, rest_q = (rest.clamp_min(LEAST_REST).log() for rest in (rest_p, rest_q))
    return torch.cat((inside_p, rest_p), dim=-1), torch.cat((inside_q, rest_q), dim=-1)


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_i min(p_i, q_i) = 1 - TV, the acceptance of rejection sampling, shape (...); p is not renormalised."""
    return torch.minimum(log_p, log_q).exp().sum(dim=-1)


LEAST_ACCEPTANCE = 1e-6
MOST_TOKENS = 256  # number of tokens that `coupled` distinguishes; all others count as one
HYBRID_RATE = 3.0  # rate at which `lk_hybrid` moves from the divergence to the acceptance


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Distributions of target and drafter for the same positions, on the same columns."""

    log_p: Tensor  # log-probabilities of the target, shape (rows, columns), float32 or float64; not renormalised
    log_q: Tensor  # log-probabilities of the drafter, same shape; sums to 1 over the columns
    log_outside: Tensor  # log of the target's mass on tokens without a column, shape (rows,)
    # log-probability of the drafter's most likely token, shape (rows,), without gradient; it may have no column
    log_best: Tensor

    def renormalised(self) -> Tensor:
        """Log-probabilities of the target given that its token has a column."""
        return self.log_p - self.log_p.logsumexp(dim=-1, keepdim=True)


Loss = Callable[[Rows], Tensor]  # a loss: rows to one number for each, shape (rows,)


def kl(rows: Rows) -> Tensor:
    """Forward divergence sum p log(p / q): covers all of the target's mass and trains from any start."""
    log_p = rows.renormalised()
    return (log_p.exp() * (log_p.clamp_min(LEAST_LOG) - rows.log_q)).sum(dim=-1)


def reverse_kl(rows: Rows) -> Tensor:
    """Reverse divergence sum q log(q / p): seeks the target's modes; unstable from a random start."""
    log_p = rows.renormalised().clamp_min(LEAST_LOG)
    return (rows.log_q.exp() * (rows.log_q.clamp_min(LEAST_LOG) - log_p)).sum(dim=-1)


def tv(rows: Rows) -> Tensor:
    """Total variation 1 - sum min(p, q): the rejections of rejection sampling."""
    return 1 - overlap(rows.log_p, rows.log_q)


def lk(rows: Rows) -> Tensor:
    """Negative log-acceptance -log sum min(p, q) of rejection sampling."""
    return -overlap(rows.log_p, rows.log_q).clamp_min(LEAST_ACCEPTANCE).log()


def lk_hybrid(rows: Rows) -> Tensor:
    """Mixture of `kl` and `tv`; the share of `kl` is exp(-3 a) with the row's own acceptance a, without gradient."""
    accepted = overlap(rows.log_p, rows.log_q)
    share = (-HYBRID_RATE * accepted.detach()).exp()
    return share * kl(rows) + (1 - share) * (1 - accepted)


def acceptance_of(rows: Rows) -> Tensor:
    """Return the acceptance of the rule `coupled`, shape (rows,), float64."""
    return coupled_acceptance(*condensed(rows.log_p, rows.log_q, MOST_TOKENS), rows.log_outside)


def coupled(rows: Rows) -> Tensor:
    """Negative log-acceptance -log J of the rule `coupled`, which shares the noise of target and drafter."""
    return -acceptance_of(rows).clamp_min(LEAST_ACCEPTANCE).log().to(rows.log_q.dtype)


def coupled_miss(rows: Rows) -> Tensor:
    """Rejections 1 - J of the rule `coupled`: what `coupled` is the logarithm of, so hopeless rows count less."""
    return (1 - acceptance_of(rows)).to(rows.log_q.dtype)


def cross_entropy(rows: Rows) -> Tensor:
    """Cross-entropy -log q of the target's most likely token."""
    return -rows.log_q.gather(-1, rows.log_p.argmax(dim=-1, keepdim=True)).squeeze(-1)


LOSSES: dict[str, Loss] = {
    function.__name__: function
    for function in (kl, reverse_kl, tv, lk, lk_hybrid, coupled, coupled_miss, cross_entropy)
}
"""Losses by name."""


def loss_named(name: str) -> Loss:
    if name not in LOSSES:
        raise ConfigurationError(f"unknown loss '{name}': {suggestion(name, LOSSES)}")
    return LOSSES[name]
