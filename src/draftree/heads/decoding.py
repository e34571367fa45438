"""Decoding of heads that draft level by level: slots with keys and values of rows, and batched passes over them.

The slots are those of models (`models/kv`): rows with the target's own hidden states become prefix, rows of drafted
nodes are tentative. A slot also keeps the state before every row of its prefix, so that a row can be run again with
another token where two texts part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.heads.base import FeatureHead
from draftree.models.base import Commit, Extend
from draftree.models.kv.pool import Leftovers, SlotPool
from draftree.models.kv.slots import KVMemory, KVSlot, LayerShape
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.models.torch.attention import LayerCall
from draftree.models.torch.dynamic import SlotPass, plan_pass

STATES = -1
"""Key of the states before the rows in the memory of the slots, beside the layers."""


@dataclass(frozen=True, slots=True)
class RowJob:
    """New rows of one sequence.

    Attributes:
        slot: the slot.
        tokens: token ids of the target.
        positions: positions of the tokens in the text.
        parents: for each row the tentative row that it follows, or -1 for the end of the prefix.
        before: states before the tokens, shape (rows, hidden).
    """

    slot: KVSlot
    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]
    before: Tensor


@final
class HeadDecoder:
    """Slots and passes of a head. All methods run without gradients.

    Args:
        head: the head, bound to its target.
        device: device of its weights.
    """

    def __init__(self, head: FeatureHead, device: torch.device) -> None:
        self.head = head
        self.device = device
        config = head.config
        self.dtype = next(head.parameters()).dtype
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        shapes = {STATES: LayerShape(1, config.hidden, 0), **dict.fromkeys(range(config.num_layers), shape)}
        self.pool = SlotPool(shapes, dtype=self.dtype, device=device, leftovers=Leftovers.MASKED)

    @property
    def footprint(self) -> Footprint:
        """Memory of weights, of a row in a slot, and of activations in bytes."""
        config = self.head.config
        return Footprint(
            weights=sum(tensor.numel() * tensor.element_size() for tensor in self.head.state_dict().values()),
            token=self.pool.memory.token_bytes,
            logits=config.draft_vocab_size * LOGIT_BYTES,
            row=(8 * config.hidden + 3 * config.intermediate) * self.dtype.itemsize,
        )

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        """Return the states before the tokens that follow, shape (rows, hidden), from hidden states of the target."""
        return self.head.project(features.to(self.device))

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Return logits of states, shape (rows, draft vocabulary), float32."""
        return self.head.logits(states)

    @torch.inference_mode()
    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows."""
        return self.head.recycle(states)

    def read(self, jobs: Sequence[RowJob]) -> list[Tensor]:
        """Append rows with states from the target to prefixes.

        Args:
            jobs: one at most for each slot, without tentative rows; each row follows the one before.

        Returns:
            States of the rows of each job, shape (rows, hidden).
        """
        keys = self.pool.memory
        found = self.run(jobs)
        with torch.inference_mode():
            for job in jobs:
                slot = job.slot
                keys.keys[STATES][slot.index, 0, slot.length : slot.length + len(job.tokens)] = job.before
        self.pool.commit([Commit(job.slot, range(len(job.tokens))) for job in jobs])
        return found

    @torch.inference_mode()
    def run(self, jobs: Sequence[RowJob]) -> list[Tensor]:
        """Append tentative rows; returns their states for each job, shape (rows, hidden)."""
        order = sorted(range(len(jobs)), key=lambda index: jobs[index].slot.index)
        ordered = [jobs[index] for index in order]
        slots = [job.slot for job in ordered]
        nodes = self.pool.append(slots, [Extend(job.slot, job.tokens, job.parents) for job in ordered])
        tokens = torch.tensor([token for job in ordered for token in job.tokens], device=self.device)
        positions = torch.tensor([position for job in ordered for position in job.positions], device=self.device)
        before = ordered[0].before if len(ordered) == 1 else torch.cat([job.before for job in ordered])
        states = self.head.run(tokens, before, positions, self._attend(slots, nodes))
        ends = list(accumulate(len(job.tokens) for job in ordered))
        found: list[Tensor] = [states] * len(jobs)
        for index, job, end in zip(order, ordered, ends, strict=True):
            found[index] = states[end - len(job.tokens) : end]
        return found

    def _attend(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]]) -> OneRow | ManyRows:
        memory, scaling = self.pool.memory, self.head.config.head_dim**-0.5
        slot = slots[0]
        if len(slots) == 1 and len(nodes[0]) == 1 and slot.depths[-1] == slot.num_tentative:
            return OneRow(memory, slot.index, slot.length + nodes[0][0], scaling)
        return ManyRows(plan_pass(memory, slots, nodes, self.device), scaling)

    def before(self, slot: KVSlot, row: int) -> Tensor:
        """Return the state before a row of a prefix, shape (1, hidden)."""
        return self.pool.memory.keys[STATES][slot.index, 0, row : row + 1].clone()


@final
class OneRow:
    """Attention of one row at the end of a chain: it sees every key of its slot.

    Args:
        memory: keys and values.
        slot: index of the slot.
        place: index of the row in the slot.
        scaling: factor of scores.
    """

    def __init__(self, memory: KVMemory, slot: int, place: int, scaling: float) -> None:
        self._memory, self._slot, self._place, self._scaling = memory, slot, place, scaling

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value, then attend; shapes as in `Attend`, with one row."""
        keys, values = self._memory.keys[layer][self._slot], self._memory.values[layer][self._slot]
        place = self._place
        keys[:, place], values[:, place] = key[0], value[0]
        grouped = query.view(keys.shape[0], -1, query.shape[-1])
        mixed = F.scaled_dot_product_attention(
            grouped, keys[:, : place + 1], values[:, : place + 1], scale=self._scaling
        )
        return mixed.view(query.shape)


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
