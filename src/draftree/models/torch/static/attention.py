"""Attention of static passes: all addresses and sizes are fixed.

Keys and values are written by index and read in place, as a slice of slots and positions; a mask hides invisible keys.
Nothing depends on a value, so nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftree.models.kv.slots import KVMemory
from draftree.models.torch.attention import LayerCall, additive, attend
from draftree.models.torch.static.buckets import WORD_BITS, Bucket
from draftree.models.torch.static.inputs import Inputs


class StaticAttention:
    """Handler of the attention calls of one static pass. Mutates the memory.

    Args:
        memory: keys and values.
        bucket: shape of the pass.
        inputs: integers of the pass, on the memory's device.
    """

    def __init__(self, memory: KVMemory, bucket: Bucket, inputs: Inputs[Tensor]) -> None:
        self._memory = memory
        self._bucket = bucket
        self._inputs = inputs
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def note_mask(self, window: int | None) -> None:
        """Do nothing: each call has its window."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values, then attend over the range of slots at once."""
        bucket, inputs = self._bucket, self._inputs
        keys, values = self._memory.keys[call.layer], self._memory.values[call.layer]
        keys[inputs.slots, :, inputs.places] = key[0].transpose(0, 1)
        values[inputs.slots, :, inputs.places] = value[0].transpose(0, 1)
        line = slice(bucket.first_slot, bucket.first_slot + bucket.num_slots)
        cells = query[0].index_select(1, inputs.row_of_cell.flatten())
        cells = cells.unflatten(1, (bucket.num_slots, bucket.nodes)).transpose(0, 1)
        mask = self._mask(call.window, query.shape[1] // keys.shape[1], query.dtype)
        mixed = attend(cells, keys[line, :, : bucket.length], values[line, :, : bucket.length], call=call, mask=mask)
        return mixed.transpose(1, 2).flatten(0, 1).index_select(0, inputs.cell_of_row).unsqueeze(0)

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of shape (slots, 1, group * nodes, length), built once per pass and window."""
        key = (window, group, dtype)
        if key not in self._masks:
            self._masks[key] = additive(self._visible(window), dtype).repeat(1, group, 1).unsqueeze(1)
        return self._masks[key]

    def _visible(self, window: int | None) -> Tensor:
        """Return which keys are visible to each cell, bool of shape (slots, nodes, length): prefix and ancestors."""
        inputs, bucket = self._inputs, self._bucket
        place = torch.arange(bucket.length, device=inputs.prefixes.device)
        offset = place - inputs.prefixes[:, None]
        node = offset.clamp(0, bucket.tree_size - 1)
        word = (node // WORD_BITS)[:, None, :].expand(-1, bucket.nodes, -1)
        bits = inputs.seen if bucket.words == 1 else inputs.seen.gather(2, word)
        is_ancestor = ((bits >> (node % WORD_BITS)[:, None, :]) & 1).bool() & (offset < bucket.tree_size)[:, None, :]
        visible = (offset < 0)[:, None, :] | is_ancestor
        if window is None:
            return visible
        # windows go by depth: siblings share a position
        position = torch.where(offset < 0, place, inputs.tree_positions.gather(1, node))
        return visible & (inputs.cell_positions[:, :, None] - position[:, None, :] < window)
