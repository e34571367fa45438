"""Passes of a head in torch, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.core.hidden import rows_of
from draftree.heads.base import FeatureHead
from draftree.heads.passes import HeadPasses, RowJob, RowResult, joined_before, requested_rows
from draftree.models.kv.pool import Leftovers
from draftree.models.kv.slots import KVMemory, KVSlot
from draftree.models.torch.attention import LayerCall
from draftree.models.torch.dynamic import SlotPass, plan_pass
from draftree.sampling.logits import Logits, TensorLogits
from draftree.sampling.subset_logits import SubsetLogits


@final
class TorchPasses(HeadPasses):
    """Passes that call the head's module.

    Args:
        head: the head, bound to its target.
        device: device of its weights.
    """

    def __init__(self, head: FeatureHead, device: torch.device) -> None:
        super().__init__(head, device, Leftovers.MASKED)

    @property
    def kernels(self) -> str:
        """Always "torch"."""
        return "torch"

    @property
    def weight_bytes(self) -> int:
        """Size of the parameters in bytes."""
        return self.parameter_bytes

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        """Return the states before the tokens that follow."""
        return self.head.project(features.to(self.device))

    @torch.inference_mode()
    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows."""
        return self.head.recycle(states)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Logits:
        """Return logits of states."""
        found = self.head.logits(states)
        return TensorLogits(found) if self.tokens is None else SubsetLogits(found, self.tokens)

    @torch.inference_mode()
    def run(
        self, memory: KVMemory, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], jobs: Sequence[RowJob]
    ) -> RowResult:
        """Run a pass over new rows."""
        given = joined_before(jobs)
        before = self.project(given) if jobs[0].is_projected else given
        starts = [0, *accumulate(len(job.tokens) for job in jobs)]
        order = sorted(range(len(jobs)), key=lambda index: slots[index].index)
        ordered = [jobs[index] for index in order]
        tokens = torch.tensor([token for job in ordered for token in job.tokens], device=self.device)
        positions = torch.tensor([position for job in ordered for position in job.positions], device=self.device)
        own = before if len(jobs) == 1 else torch.cat([before[starts[i] : starts[i + 1]] for i in order])
        attend = self._attend(memory, [slots[index] for index in order], [nodes[index] for index in order])
        states = self.head.run(tokens, own, positions, attend)
        if order != list(range(len(jobs))):
            ends = dict(zip(order, accumulate(len(job.tokens) for job in ordered), strict=True))
            states = torch.cat([states[ends[i] - len(job.tokens) : ends[i]] for i, job in enumerate(jobs)])
        requested = requested_rows(jobs)
        return RowResult(before, states, requested, self.logits(rows_of(states, requested)))

    def _attend(
        self, memory: KVMemory, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]]
    ) -> ChainRows | ManyRows:
        scaling = self.head.config.head_dim**-0.5
        slot = slots[0]
        if len(slots) == 1 and slot.depths[-1] == slot.num_tentative:
            return ChainRows(memory, slot.index, slot.length + nodes[0][0], scaling)
        return ManyRows(plan_pass(memory, slots, nodes, self.device), scaling)


@final
class ChainRows:
    """Attention of the last rows of one slot whose tentative rows are a chain: each sees all rows before it.

    Args:
        memory: keys and values.
        slot: index of the slot.
        place: index of the first row in the slot.
        scaling: factor of scores.
    """

    def __init__(self, memory: KVMemory, slot: int, place: int, scaling: float) -> None:
        self._memory, self._slot, self._place, self._scaling = memory, slot, place, scaling
        self._mask: Tensor | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values, then attend; shapes as in `Attend`."""
        keys, values = self._memory.keys[layer][self._slot], self._memory.values[layer][self._slot]
        rows, first, end = len(query), self._place, self._place + len(query)
        keys[:, first:end], values[:, first:end] = key.transpose(0, 1), value.transpose(0, 1)
        keys, values = keys[None, :, :end], values[None, :, :end]
        group = query.shape[1] // keys.shape[1]
        if rows > 1 and self._mask is None:
            hidden = torch.full((rows, end), -math.inf, dtype=query.dtype, device=query.device).triu_(first + 1)
            self._mask = hidden.repeat(group, 1)
        # the queries of one key head become rows; four axes select the faster kernel
        grouped = query.transpose(0, 1).reshape(1, -1, group * rows, query.shape[-1])
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=self._scaling)
        return mixed.view(query.shape[1], rows, -1).transpose(0, 1)


@final
class ManyRows:
    """Attention of rows of several slots or trees.

    Args:
        current: handler of the attention calls.
        scaling: factor of scores.
    """

    def __init__(self, current: SlotPass, scaling: float) -> None:
        self._current, self._scaling = current, scaling

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values, then attend; shapes as in `Attend`."""
        call = LayerCall(layer, self._scaling, window=None, softcap=None, sinks=None)
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        return self._current.attend(call, *parts)[0]
