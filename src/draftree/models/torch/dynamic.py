"""Dynamic passes over slots: blocks of rows, visible keys, and writing of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.core.tree import ancestor_mask, is_chain
from draftree.models.kv.slots import KVMemory, KVSlot
from draftree.models.torch.attention import LayerCall, additive, attend

MAX_BATCHED_ROWS = 64
"""Maximum rows of a job in a shared block; padding others to a longer job costs more than a call."""


@dataclass(slots=True)
class Block:
    """Jobs of neighbouring slots that attend in one call, padded to the longest of them.

    Attributes:
        slots: slice of slot indices.
        rows: index of each row in the pass, shape (jobs, nodes); None if the jobs' rows are contiguous and unpadded.
        first_row: first row of the block.
        num_rows: rows of the block without padding.
        places: indices of the real rows in the padded (jobs * nodes) block; None if nothing is padded.
        nodes: rows per job, with padding.
        length: number of keys to read.
        visible: bool of shape (jobs, nodes, length); None if all rows see all keys.
        row_positions: position of each row, shape (jobs, nodes).
        key_positions: position of each key, shape (jobs, length).
        causal: whether the rows are a prompt from its first token.
    """

    slots: slice
    rows: Tensor | None
    first_row: int
    num_rows: int
    places: Tensor | None
    nodes: int
    length: int
    visible: Tensor | None
    row_positions: Tensor
    key_positions: Tensor
    causal: bool
    masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = field(default_factory=dict)
    biased: dict[int, Tensor] = field(default_factory=dict)
    """Masks with a bias, by the address of the bias."""

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask of shape (jobs, 1, group * nodes, length), built once per pass and window."""
        key = (window, group, dtype)
        if key not in self.masks:
            self.masks[key] = self._make_mask(window, group, dtype)
        return self.masks[key]

    def biased_mask(self, call: LayerCall, bias: Tensor) -> Tensor:
        """Return a bias by distance plus the mask, shape (jobs, heads, nodes, length), built once per pass and bias."""
        key = bias.data_ptr()
        if key not in self.biased:
            distance = (self.row_positions[:, :, None] - self.key_positions[:, None, :]).clamp_(min=0)
            added = bias[:, distance].transpose(0, 1)
            mask = self.mask(call.window, 1, bias.dtype)
            self.biased[key] = added if mask is None else added + mask
        return self.biased[key]

    def _make_mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        visible = self.visible
        # windows go by depth: siblings share a position
        if window is not None and int(self.row_positions.max()) >= window:
            near = self.row_positions[:, :, None] - self.key_positions[:, None, :] < window
            visible = near if visible is None else visible & near
        if visible is None:
            return None
        return additive(visible, dtype).repeat(1, group, 1).unsqueeze(1)


@dataclass(slots=True)
class SlotPass:
    """Handler of the attention calls of one dynamic pass over slots. Mutates their memory."""

    memory: KVMemory
    blocks: Sequence[Block]
    num_rows: int
    """Number of rows of sequences; later rows are padding and attend to nothing."""
    slot_of_row: Tensor | None
    place_of_row: Tensor | None
    only: tuple[int, int] | None
    """Slot and first index, if all rows belong to one sequence and are written as one slice."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values, then attend block by block."""
        keys, values = self.memory.keys[call.layer], self.memory.values[call.layer]
        count = self.num_rows
        if self.only is not None:
            slot, place = self.only
            keys[slot, :, place : place + count] = key[0, :, :count]
            values[slot, :, place : place + count] = value[0, :, :count]
        else:
            keys[self.slot_of_row, :, self.place_of_row] = key[0, :, :count].transpose(0, 1)
            values[self.slot_of_row, :, self.place_of_row] = value[0, :, :count].transpose(0, 1)
        parts = [self._attend_block(block, call, query, keys, values) for block in self.blocks]
        if query.shape[2] > count:
            parts.append(parts[0].new_zeros(query.shape[2] - count, *parts[0].shape[1:]))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed.unsqueeze(0)

    def note_mask(self, window: int | None) -> None:
        """Do nothing: each call has its window."""

    def _attend_block(self, block: Block, call: LayerCall, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads, dim = query.shape[1], query.shape[3]
        if block.rows is None:
            part = query[0, :, block.first_row : block.first_row + block.num_rows]
            part = part.reshape(heads, -1, block.nodes, dim).transpose(0, 1)
        else:
            part = query[0][:, block.rows].transpose(0, 1)
        k, v = keys[block.slots, :, : block.length], values[block.slots, :, : block.length]
        if call.bias is not None:
            mixed = attend(part, k, v, call=call, mask=block.biased_mask(call, call.bias))
        elif block.causal and call.window is None and call.softcap is None and call.sinks is None:
            mixed = F.scaled_dot_product_attention(part, k, v, is_causal=True, scale=call.scaling, enable_gqa=True)
        else:
            mixed = attend(part, k, v, call=call, mask=block.mask(call.window, heads // keys.shape[1], query.dtype))
        flat = mixed.transpose(1, 2).reshape(-1, heads, mixed.shape[-1])
        return flat if block.places is None else flat[block.places]


def is_run(numbers: Sequence[int]) -> bool:
    """Return whether ascending numbers have no gap."""
    return numbers[-1] - numbers[0] == len(numbers) - 1


def plan_pass(
    memory: KVMemory, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], device: torch.device
) -> SlotPass:
    """Return the handler of the attention calls of one pass.

    Args:
        memory: keys and values of the slots.
        slots: slot of each job, ascending by index, with the nodes appended.
        nodes: for each job the tentative nodes that are rows of the pass, ascending.
        device: device of the memory.
    """

    def visible(job: int) -> Tensor | None:
        parents, own = slots[job].parents, nodes[job]
        if is_chain(parents) and is_run(own) and own[-1] == len(parents) - 1:
            return None
        mask = torch.from_numpy(ancestor_mask(parents))
        return mask[own[0] : own[-1] + 1] if is_run(own) else mask[list(own)]

    num_rows = sum(map(len, nodes))
    blocks = plan_blocks(slots, nodes, visible, device)
    if len(slots) == 1 and is_run(nodes[0]):
        return SlotPass(memory, blocks, num_rows, None, None, (slots[0].index, slots[0].length + nodes[0][0]))
    slot_of_row = [slot.index for slot, own in zip(slots, nodes, strict=True) for _ in own]
    place_of_row = [slot.length + node for slot, own in zip(slots, nodes, strict=True) for node in own]
    slot_index, place_index = (torch.tensor(rows, device=device) for rows in (slot_of_row, place_of_row))
    return SlotPass(memory, blocks, num_rows, slot_index, place_index, None)


def plan_blocks(
    slots: Sequence[KVSlot],
    nodes: Sequence[Sequence[int]],
    visible: Callable[[int], Tensor | None],
    device: torch.device,
) -> list[Block]:
    """Divide a pass into blocks.

    Args:
        slots: slot of each job, ascending by index, with the nodes appended.
        nodes: for each job the tentative nodes that are rows of the pass, ascending.
        visible: for a job the bool mask (rows, tentative nodes) in its tree; None if its rows end a chain.
        device: device of the masks.
    """
    blocks: list[Block] = []
    counts = [len(chosen) for chosen in nodes]
    start, first_row = 0, 0
    while start < len(slots):
        end = start + 1
        while (
            end < len(slots)
            and max(counts[start], counts[end]) <= MAX_BATCHED_ROWS
            and slots[end].index == slots[end - 1].index + 1
        ):
            end += 1
        blocks.append(_block(slots[start:end], nodes[start:end], visible, start, first_row, device))
        first_row += sum(counts[start:end])
        start = end
    return blocks


def _block(
    slots: Sequence[KVSlot],
    chosen: Sequence[Sequence[int]],
    visible: Callable[[int], Tensor | None],
    first_job: int,
    first_row: int,
    device: torch.device,
) -> Block:
    nodes = max(len(own) for own in chosen)
    length = max(slot.length + slot.num_tentative for slot in slots)
    mask = torch.zeros(len(slots), nodes, length, dtype=torch.bool)
    row_positions = torch.zeros(len(slots), nodes, dtype=torch.long)
    key_positions = torch.arange(length).repeat(len(slots), 1)
    rows = torch.zeros(len(slots), nodes, dtype=torch.long)
    places: list[int] = []
    row = first_row
    for job, (slot, own) in enumerate(zip(slots, chosen, strict=True)):
        count, total = len(own), slot.length + slot.num_tentative
        positions = torch.tensor(slot.depths) + (slot.length - 1)
        row_positions[job, :count] = positions[own[0] : own[-1] + 1] if is_run(own) else positions[list(own)]
        key_positions[job, slot.length : total] = positions
        mask[job, :, : slot.length] = True
        tree = visible(first_job + job)
        if tree is None:
            mask[job, :count, slot.length : total] = torch.ones(count, slot.num_tentative, dtype=torch.bool).tril(
                slot.num_tentative - count
            )
        else:
            mask[job, :count, slot.length : total] = tree
        mask[job, count:, 0] = True  # softmax over no visible key gives NaN, in padding rows as well
        rows[job, :count] = torch.arange(row, row + count)
        rows[job, count:] = row
        places.extend(range(job * nodes, job * nodes + count))
        row += count
    padded = len(places) != len(slots) * nodes
    causal = len(slots) == 1 and slots[0].length == 0 and nodes == length > 1 and visible(first_job) is None
    return Block(
        slots=slice(slots[0].index, slots[-1].index + 1),
        rows=rows.to(device) if padded else None,
        first_row=first_row,
        num_rows=len(places),
        places=torch.tensor(places, device=device) if padded else None,
        nodes=nodes,
        length=length,
        visible=None if bool(mask.all()) else mask.to(device),
        row_positions=row_positions.to(device),
        key_positions=key_positions.to(device),
        causal=causal,
    )
