"""Multi-step training: the states of a head that reads its own states, and the loss and gradients over all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.heads.base import FeatureHead
from draftree.train.acceptance import overlap
from draftree.train.attend import UnrollAttention
from draftree.train.batches import Batch
from draftree.train.losses import Loss, Rows
from draftree.train.teacher import Teacher

__all__ = ["StepTotals", "StepWeights", "backward", "unroll"]

Logits = Callable[[int, Tensor, Tensor], Tensor]
"""Step, indices of chains and their states to logits, shape (chains, draft vocabulary), float32."""
CHUNK_ROWS = 512
"""Rows whose logits exist at the same time: memory is this times the draft vocabulary, some times over."""


def unroll(head: FeatureHead, batch: Batch, steps: int) -> Iterator[Tensor]:
    """Yield the states of all chains, step by step, shape (chains, hidden).

    Tokens of later steps are those of the text, as after drafts that were right so far; states are the head's own.

    Args:
        head: the head.
        batch: the texts.
        steps: number of steps, at least 1.
    """
    attend = UnrollAttention(batch)
    states = head.run(batch.tokens, head.project(batch.features), batch.positions, attend, batch.chains)
    yield states
    for step in range(1, steps):
        attend.next_step()
        rows, _ = batch.step_rows(step)
        positions = batch.positions[batch.chains] + step
        states = head.run(batch.tokens[rows], head.recycle(states), positions, attend)
        yield states


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of steps. The gain of step s is that of its chain times the chance that all steps before are accepted.

    Attributes:
        decay: weight of each step relative to the one before; None for the survival of the chain, without gradient.
        smoothing: share of the survival that is 1 whatever the acceptance, so that late steps train from the start.

    Raises:
        ConfigurationError: a value is out of range.
    """

    decay: float | None = None
    smoothing: float = 0.3

    def __post_init__(self) -> None:
        for name in ("decay", "smoothing"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigurationError(f"{name} of steps is {value}: it must be from 0 to 1")

    def after(self, weights: Tensor, accepted: Tensor) -> Tensor:
        """Return the weights of the next step, shape (chains,), from those of a step and its acceptance."""
        if self.decay is not None:
            return weights * self.decay
        return weights * (self.smoothing + (1 - self.smoothing) * accepted)


@dataclass(slots=True)
class StepTotals:
    """Sums over the chains of one step.

    Attributes:
        count: number of chains with room for the step.
        loss: sum of losses, without weights.
        weighted: sum of weighted losses.
        accepted: sum of sum min(p, q).
        greedy: number of chains whose most likely token is the target's.
    """

    count: int = 0
    loss: float = 0.0
    weighted: float = 0.0
    accepted: float = 0.0
    greedy: float = 0.0

    def add(self, other: StepTotals) -> None:
        """Add the sums of other chains."""
        self.count += other.count
        self.loss += other.loss
        self.weighted += other.weighted
        self.accepted += other.accepted
        self.greedy += other.greedy


def backward(
    states_of_steps: Iterable[Tensor],
    logits: Logits,
    batch: Batch,
    teacher: Teacher,
    *,
    loss: Loss,
    weights: StepWeights,
    total: float,
    token_weights: Tensor | None = None,
) -> list[StepTotals]:
    """Add the gradients of the weighted loss over all steps to the parameters; return sums by step.

    Logits exist for `CHUNK_ROWS` rows at a time: the gradient of each chunk flows to the states at once, and from the
    states through the steps at the end.

    Args:
        states_of_steps: states of all chains for each step, shape (chains, hidden), as `unroll` yields them.
        logits: makes logits from states.
        batch: the texts.
        teacher: the target's distributions, one row for each chain: those after the token where it starts.
        loss: the loss of a row.
        weights: weights of the steps.
        total: divisor of the summed loss, the number of chains of all batches of an update.
        token_weights: weight of the prediction after the start of each chain, shape (chains,); None for 1. Later steps
            have the weight of the chain that starts where they predict.
    """
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    found: list[StepTotals] = []
    survival = torch.ones(batch.num_chains, device=batch.chains.device)
    for step, states in enumerate(states_of_steps):
        _, has_room = batch.step_rows(step)
        chosen = has_room.nonzero()[:, 0]
        if not len(chosen):
            break
        targets = batch.step_chains(step)[chosen]
        scale = survival[chosen] if token_weights is None else survival[chosen] * token_weights[targets]
        leaf = states.detach().requires_grad_()
        totals = StepTotals()
        accepted = torch.zeros_like(survival)
        for part in torch.arange(len(chosen), device=chosen.device).split(CHUNK_ROWS):
            rows = teacher.part(targets[part]).rows(logits(step, chosen[part], leaf[chosen[part]]))
            sums, accepted[chosen[part]] = _chunk(rows, loss, scale[part], total)
            totals.add(sums)
        assert leaf.grad is not None
        outputs.append(states)
        gradients.append(leaf.grad)
        found.append(totals)
        survival = weights.after(survival, accepted)
    torch.autograd.backward(outputs, gradients)
    return found


def _chunk(rows: Rows, loss: Loss, scale: Tensor, total: float) -> tuple[StepTotals, Tensor]:
    """Run the backward pass of some rows; return their sums and their acceptance."""
    losses = loss(rows)
    weighted = (losses * scale).sum()
    (weighted / total).backward()
    with torch.no_grad():
        accepted = overlap(rows.log_p, rows.log_q)
        is_inside = rows.log_p.amax(dim=-1) > rows.log_outside
        wanted = rows.log_p.argmax(dim=-1, keepdim=True)
        greedy = (rows.log_q.gather(-1, wanted)[:, 0] >= rows.log_best) & is_inside
        sums = torch.stack((losses.sum(), weighted, accepted.sum(), greedy.sum().to(losses.dtype))).tolist()
    return StepTotals(len(losses), *sums), accepted.to(scale.dtype)
