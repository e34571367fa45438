"""Losses of drafters, by name: each maps rows of target and drafter to one number per row.

Divergences use the target's probabilities renormalised on the draft vocabulary, because the drafter cannot propose
other tokens. Acceptance terms use them as they are, because the target may choose other tokens.

Sources: DistillSpec (arXiv 2310.08461) for divergences, LK losses (arXiv 2602.23881), Gumbel coupling
(arXiv 2408.07978) for `coupled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftree.core.errors import ConfigurationError, suggestion
from draftree.train.acceptance import LEAST_LOG, condensed, coupled_acceptance, overlap

__all__ = ["LOSSES", "Rows", "loss_named"]

LEAST_ACCEPTANCE = 1e-6
MOST_TOKENS = 256
"""Number of tokens that `coupled` distinguishes; all others count as one."""
HYBRID_RATE = 3.0
"""Rate at which `lk_hybrid` moves from the divergence to the acceptance."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Distributions of target and drafter for the same positions, on the same columns.

    Attributes:
        log_p: log-probabilities of the target, shape (rows, columns), float32 or float64; not renormalised.
        log_q: log-probabilities of the drafter, same shape; sums to 1 over the columns.
        log_outside: log of the target's mass on tokens without a column, shape (rows,).
        log_best: log-probability of the drafter's most likely token, shape (rows,), without gradient; it may have no
            column.
    """

    log_p: Tensor
    log_q: Tensor
    log_outside: Tensor
    log_best: Tensor

    def renormalised(self) -> Tensor:
        """Log-probabilities of the target given that its token has a column."""
        return self.log_p - self.log_p.logsumexp(dim=-1, keepdim=True)


Loss = Callable[[Rows], Tensor]
"""A loss: rows to one number for each, shape (rows,)."""


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


def coupled(rows: Rows) -> Tensor:
    """Negative log-acceptance -log J of the rule `coupled`, which shares the noise of target and drafter."""
    accepted = coupled_acceptance(*condensed(rows.log_p, rows.log_q, MOST_TOKENS), rows.log_outside)
    return -accepted.clamp_min(LEAST_ACCEPTANCE).log().to(rows.log_q.dtype)


def coupled_miss(rows: Rows) -> Tensor:
    """Rejections 1 - J of the rule `coupled`: what `coupled` is the logarithm of, so hopeless rows count less."""
    accepted = coupled_acceptance(*condensed(rows.log_p, rows.log_q, MOST_TOKENS), rows.log_outside)
    return (1 - accepted).to(rows.log_q.dtype)


def cross_entropy(rows: Rows) -> Tensor:
    """Cross-entropy -log q of the target's most likely token."""
    return -rows.log_q.gather(-1, rows.log_p.argmax(dim=-1, keepdim=True)).squeeze(-1)


LOSSES: dict[str, Loss] = {
    function.__name__: function
    for function in (kl, reverse_kl, tv, lk, lk_hybrid, coupled, coupled_miss, cross_entropy)
}
"""Losses by name."""


def loss_named(name: str) -> Loss:
    """Return a loss.

    Raises:
        ConfigurationError: no loss has this name.
    """
    if name not in LOSSES:
        raise ConfigurationError(f"unknown loss '{name}': {suggestion(name, LOSSES)}")
    return LOSSES[name]
