"""Multi-step training: the states of a head that reads its own states, and the loss and gradients over all steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftree.core.errors import ConfigurationError
from draftree.heads.base import FeatureHead
from draftree.train.batches import Batch
from draftree.train.losses import Loss, Rows, overlap
from draftree.train.teacher import Teacher

# Attention of training on a head's own steps.
#
# At step 0 every row attends to the rows of its text up to itself. At step s the row of a chain attends to the step-0
# rows up to the chain's start, which have true hidden states, and to the chain's own rows of steps 1 to s. Decoding
# sees the same: after verification the keys of accepted tokens are computed again from true hidden states.
#
# Source: training-time test, EAGLE-3 (arXiv 2503.01840).


class UnrollAttention:
    """`Attend` of a batch; the first call for a layer is step 0."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._true: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of step 0 by layer, padded, shape (texts, heads, longest, head_dim)."""
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Keys and values of later steps by layer, shape (chains, heads, head_dim)."""
        self._hidden: Tensor | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as `Attend` does.

        Rows are those of the batch at step 0, where queries may be those of the chains only, and its chains afterwards.
        """
        groups = query.shape[-2] // key.shape[-2]
        key, value = (part.repeat_interleave(groups, dim=-2) for part in (key, value))
        return self._later(layer, query, key, value) if layer in self._true else self._first(layer, query, key, value)

    def _first(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, chains = self._batch.rows, self._batch.chain_rows
        is_whole = len(query) == len(key)
        key, value = (rows.padded(part).transpose(1, 2) for part in (key, value))
        self._true[layer], self._own[layer] = (key, value), []
        if is_whole:
            query = rows.padded(query).transpose(1, 2)
            # padding is at the end, where causal rows of the text do not look
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
            return rows.flat(mixed.transpose(1, 2))
        query = chains.padded(query).transpose(1, 2)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=~self._is_hidden())
        return chains.flat(mixed.transpose(1, 2))

    def _later(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        chains = self._batch.chain_rows
        cache = self._own[layer]
        cache.append((key, value))
        true_key, true_value = self._true[layer]
        scaled = query / math.sqrt(query.shape[-1])
        scores = chains.padded(scaled).transpose(1, 2) @ true_key.transpose(-1, -2)
        scores = scores.float().masked_fill(self._is_hidden(), -math.inf)
        # one key of each step: products of rows, without a matrix
        diagonal = torch.stack([(scaled * step_key).sum(-1) for step_key, _ in cache], dim=-1).float()
        weights = torch.cat((scores, chains.padded(diagonal).transpose(1, 2)), dim=-1).softmax(dim=-1)
        weights = weights.to(query.dtype)
        longest = true_key.shape[2]
        mixed = chains.flat((weights[..., :longest] @ true_value).transpose(1, 2))
        shares = chains.flat(weights[..., longest:].transpose(1, 2))
        for step, (_, step_value) in enumerate(cache):
            mixed = mixed + shares[..., step, None] * step_value
        return mixed

    def _is_hidden(self) -> Tensor:
        """Return which true rows come after the start of each chain, shape (texts, 1, chains, rows)."""
        if self._hidden is None:
            batch = self._batch
            start = batch.chain_rows.padded(batch.rows.columns[batch.chains])
            columns = torch.arange(batch.rows.longest, device=start.device)
            self._hidden = (columns > start[..., None])[:, None]
        return self._hidden


Logits = Callable[[int, Tensor, Tensor], Tensor]
"""Step, indices of chains and their states to logits, shape (chains, draft vocabulary), float32."""
CHUNK_ROWS = 512  # rows whose logits exist at the same time: memory is this times the draft vocabulary, some times over


def unroll(head: FeatureHead, batch: Batch, steps: int) -> Iterator[Tensor]:
    """Yield the states of all chains, step by step, shape (chains, hidden).

    Tokens of later steps are those of the text, as after drafts that were right so far; states are the head's own.

    `steps`: number of steps, at least 1.
    """
    attend = UnrollAttention(batch)
    states = head.run(batch.tokens, head.project(batch.features), batch.positions, attend, batch.chains)
    yield states
    for step in range(1, steps):
        rows, _ = batch.step_rows(step)
        positions = batch.positions[batch.chains] + step
        states = head.run(batch.tokens[rows], head.recycle(states), positions, attend)
        yield states


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of steps. The gain of step s is that of its chain times the chance that all steps before are accepted."""

    # weight of each step relative to the one before; None for the survival of the chain, without gradient
    decay: float | None = None
    # share of the survival that is 1 whatever the acceptance, so that late steps train from the start
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
    """Sums over the chains of one step."""

    count: int = 0  # number of chains with room for the step
    loss: float = 0.0  # sum of losses, without weights
    weighted: float = 0.0  # sum of weighted losses
    accepted: float = 0.0  # sum of sum min(p, q)
    greedy: float = 0.0  # number of chains whose most likely token is the target's

    def add(self, other: StepTotals) -> None:
        for name in ("count", "loss", "weighted", "accepted", "greedy"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


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

    `states_of_steps`: states of all chains for each step, shape (chains, hidden), as `unroll` yields them. `teacher`:
    the target's distributions, one row for each chain: those after the token where it starts. `total`: divisor of the
    summed loss, the number of chains of all batches of an update. `token_weights`: weight of the prediction after the
    start of each chain, shape (chains,); None for 1. Later steps have the weight of the chain that starts where they
    predict.
    """
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    sums_of_steps: list[StepTotals] = []
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
        sums_of_steps.append(totals)
        survival = weights.after(survival, accepted)
    torch.autograd.backward(outputs, gradients)
    return sums_of_steps


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
