"""Our attention: rows of many sequences, each seeing its slot's prefix and its own ancestors.

Registered with transformers once. A pass is announced by a context variable; without one, the call is answered
plainly with the mask that transformers made, so a model that a user shares with us still works for the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.slots import KVMemory, KVSlot, LayerShape

NAME = "draftree"
MAX_BATCHED_ROWS = 64
"""Jobs with more rows than this attend alone: padding others to their length would waste more than a call costs."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asks for besides queries, keys and values."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Pass(Protocol):
    """What answers the attention calls of one forward pass."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries, keys and values of shape (1, heads, rows, head_dim); returns (1, rows, heads, head_dim)."""

    def note_mask(self, window: int | None) -> None:
        """The model asks for a mask of this window, which it will not get: the pass knows who sees whom."""


_CURRENT: ContextVar[Pass | None] = ContextVar("draftree_pass", default=None)


@contextmanager
def announced(current: Pass) -> Iterator[None]:
    """Attention calls inside go to this pass."""
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    current = _CURRENT.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = LayerCall(int(module.layer_idx), scale, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    if current is not None:
        return current.attend(call, query, key, value), None
    if attention_mask is None:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = seen.tril(key.shape[2] - query.shape[2])[None, None]
    mixed = attend(query, key, value, call=call, mask=_additive(attention_mask, query.dtype))
    return mixed.transpose(1, 2).contiguous(), None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    current = _CURRENT.get()
    if current is not None:
        current.note_mask(kwargs.get("local_size"))
        return None
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


def register() -> None:
    """Make our attention known to transformers; twice is once."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    # without this one transformers would hand every layer no mask at all, without a word
    AttentionMaskInterface.register(NAME, _mask)


def attend(query: Tensor, key: Tensor, value: Tensor, *, call: LayerCall, mask: Tensor | None) -> Tensor:
    """Attention of grouped heads.

    Args:
        query: shape (batch, heads, nodes, key_dim).
        key: shape (batch, kv_heads, length, key_dim).
        value: shape (batch, kv_heads, length, value_dim).
        call: scaling, soft cap and sinks of the layer.
        mask: what is added to the scores: shape (batch, 1, nodes, length) or, with rows repeated for every head
            of a group, (batch, 1, group * nodes, length); 0 or -inf; None to see all.

    Returns:
        Shape (batch, heads, nodes, value_dim).
    """
    batch, heads, nodes, _ = query.shape
    group = heads // key.shape[1]
    # the queries of one key head become rows: keys are read once and never repeated
    rows = query.reshape(batch, key.shape[1], group * nodes, query.shape[-1])
    if mask is not None and mask.shape[2] != group * nodes:
        mask = mask.repeat(1, 1, group, 1)
    if call.softcap is None and call.sinks is None:
        mixed = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=call.scaling)
    else:
        mixed = _attend_plainly(rows, key, value, call=call, mask=mask, group=group)
    return mixed.reshape(batch, heads, nodes, value.shape[-1])


def _attend_plainly(
    rows: Tensor, key: Tensor, value: Tensor, *, call: LayerCall, mask: Tensor | None, group: int
) -> Tensor:
    scores = (rows @ key.transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores = scores + mask
    if call.sinks is None:
        return torch.softmax(scores, dim=-1).to(value.dtype) @ value
    batch, kv_heads, count, _ = scores.shape
    sinks = call.sinks.float().reshape(1, kv_heads, group, 1).expand(batch, -1, -1, count // group)
    scores = torch.cat([scores, sinks.reshape(batch, kv_heads, count, 1)], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :-1].to(value.dtype) @ value


@dataclass(slots=True)
class Block:
    """Jobs that attend together: neighbouring slots, rows padded to the longest of them.

    Attributes:
        slots: slice of slot indices.
        rows: index of each row in the pass, shape (jobs, nodes); None if the jobs' rows lie side by side unpadded.
        first_row: first row of the block.
        num_rows: rows of the block without padding.
        places: where the true rows lie in the padded (jobs * nodes) block; None if nothing is padded.
        nodes: rows a job, padded.
        length: keys to read.
        visible: bool of shape (jobs, nodes, length); None if all rows see all keys.
        row_positions: position of each row, shape (jobs, nodes).
        key_positions: position of each key, shape (jobs, length).
        causal: the rows are a whole prompt with nothing before it.
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

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask of shape (jobs, 1, group * nodes, length), made once a pass for each window."""
        key = (window, group, dtype)
        if key not in self.masks:
            self.masks[key] = self._make_mask(window, group, dtype)
        return self.masks[key]

    def _make_mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        visible = self.visible
        # windows go by depth: siblings stand at one position, whatever their index is
        if window is not None and int(self.row_positions.max()) >= window:
            near = self.row_positions[:, :, None] - self.key_positions[:, None, :] < window
            visible = near if visible is None else visible & near
        if visible is None:
            return None
        return _additive(visible, dtype).repeat(1, group, 1).unsqueeze(1)


@dataclass(slots=True)
class SlotPass:
    """A pass over slots: writes the rows' keys and values and attends over what each row may see."""

    memory: KVMemory
    blocks: Sequence[Block]
    num_rows: int
    """Rows that belong to sequences; rows behind them are padding and attend to nothing."""
    slot_of_row: Tensor | None
    place_of_row: Tensor | None
    only: tuple[int, int] | None
    """Slot and first place, if all rows are one sequence's: written with one slice."""

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
        """Windows come with the calls."""

    def _attend_block(self, block: Block, call: LayerCall, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads, dim = query.shape[1], query.shape[3]
        if block.rows is None:
            part = query[0, :, block.first_row : block.first_row + block.num_rows]
            part = part.reshape(heads, -1, block.nodes, dim).transpose(0, 1)
        else:
            part = query[0][:, block.rows].transpose(0, 1)
        k, v = keys[block.slots, :, : block.length], values[block.slots, :, : block.length]
        if block.causal and call.window is None and call.softcap is None and call.sinks is None:
            mixed = F.scaled_dot_product_attention(part, k, v, is_causal=True, scale=call.scaling, enable_gqa=True)
        else:
            mixed = attend(part, k, v, call=call, mask=block.mask(call.window, heads // keys.shape[1], query.dtype))
        flat = mixed.transpose(1, 2).reshape(-1, heads, mixed.shape[-1])
        return flat if block.places is None else flat[block.places]


@dataclass(slots=True)
class ProbePass:
    """A causal pass that stores nothing: it learns which layers attend, with which shapes and windows."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows_of_calls: set[int] = field(default_factory=set)
    windows_of_masks: set[int] = field(default_factory=set)

    def note_mask(self, window: int | None) -> None:
        """A window that some layer must keep to."""
        if window is not None:
            self.windows_of_masks.add(window)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Plain causal attention among the rows of the pass."""
        self.shapes[call.layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        if call.window is not None:
            self.windows_of_calls.add(call.window)
        rows = query.shape[2]
        visible = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=query.device).tril()
        mixed = attend(query, key, value, call=call, mask=_additive(visible, query.dtype))
        return mixed.transpose(1, 2).contiguous()


def plan_blocks(
    slots: Sequence[KVSlot], counts: Sequence[int], visible: Callable[[int], Tensor | None], device: torch.device
) -> list[Block]:
    """Blocks of a pass; see `Block`.

    Args:
        slots: a slot a job, ascending by index; the new nodes are already noted in them.
        counts: new rows a job.
        visible: for a job the bool mask (rows, tentative nodes) among its tree; None if the new rows are a chain.
        device: where the masks go.
    """
    blocks: list[Block] = []
    start, first_row = 0, 0
    while start < len(slots):
        end = start + 1
        while (
            end < len(slots)
            and max(counts[start], counts[end]) <= MAX_BATCHED_ROWS
            and slots[end].index == slots[end - 1].index + 1
        ):
            end += 1
        blocks.append(_block(slots[start:end], counts[start:end], visible, start, first_row, device))
        first_row += sum(counts[start:end])
        start = end
    return blocks


def _block(
    slots: Sequence[KVSlot],
    counts: Sequence[int],
    visible: Callable[[int], Tensor | None],
    first_job: int,
    first_row: int,
    device: torch.device,
) -> Block:
    nodes = max(counts)
    length = max(slot.length + slot.num_tentative for slot in slots)
    mask = torch.zeros(len(slots), nodes, length, dtype=torch.bool)
    row_positions = torch.zeros(len(slots), nodes, dtype=torch.long)
    key_positions = torch.arange(length).repeat(len(slots), 1)
    rows = torch.zeros(len(slots), nodes, dtype=torch.long)
    places: list[int] = []
    row = first_row
    for job, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        total = slot.length + slot.num_tentative
        positions = torch.tensor(slot.depths) + (slot.length - 1)
        row_positions[job, :count] = positions[-count:]
        key_positions[job, slot.length : total] = positions
        mask[job, :, : slot.length] = True
        tree = visible(first_job + job)
        if tree is None:
            mask[job, :count, slot.length : total] = torch.ones(count, slot.num_tentative, dtype=torch.bool).tril(
                slot.num_tentative - count
            )
        else:
            mask[job, :count, slot.length : total] = tree
        mask[job, count:, 0] = True  # a padding row must see something, or softmax gives NaN
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
