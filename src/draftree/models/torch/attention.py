"""Attention of many sequences in one pass, each row attending to its slot's prefix and its own ancestors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.tensors import to_device
from draftree.core.tree import ancestor_mask, is_chain
from draftree.models.kv.slots import KVMemory, KVSlot, LayerShape

NAME = "draftree"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Arguments of one layer's attention besides queries, keys and values."""

    layer: int  # index of the layer
    scaling: float  # factor of the scores
    window: int | None  # size of its sliding window; None for all tokens
    softcap: float | None  # soft cap of the scores; None for none
    sinks: Tensor | None  # logits of the sinks, one for each head; None for none
    bias: Tensor | None = None  # added to the scores by distance in positions, shape (heads, distances); None for none


class Pass(Protocol):
    """Handler of the attention calls of one forward pass."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; arguments have shape (1, heads, rows, head_dim), the result (1, rows, heads, head_dim)."""

    def note_mask(self, window: int | None) -> None:
        """Record the window of a requested mask; the pass computes masks itself."""


_CURRENT: ContextVar[Pass | None] = ContextVar("draftree_pass", default=None)
_LAYER: ContextVar[int] = ContextVar("draftree_layer", default=-1)
_RECORD: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("draftree_record", default=None)


@contextmanager
def announced(current: Pass) -> Iterator[None]:
    """Route attention calls inside to this pass."""
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def numbered(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Number the calls of attentions that several of these layers share; others know their layer."""
    token = _LAYER.set(-1)
    hooks = [layer.register_forward_pre_hook(partial(_note_layer, index)) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _LAYER.reset(token)


def _note_layer(index: int, *_: Any) -> None:
    _LAYER.set(index)


@contextmanager
def recorded() -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Record keys and values of calls outside of passes by layer, shape (batch, kv_heads, rows, dim)."""
    layers: dict[int, tuple[Tensor, Tensor]] = {}
    token = _RECORD.set(layers)
    try:
        yield layers
    finally:
        _RECORD.reset(token)


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
    # attentions outside of the decoder, such as those of images, and shared ones have no layer index
    layer = getattr(module, "layer_idx", None)
    layer = _LAYER.get() if layer is None or layer < 0 else int(layer)
    call = LayerCall(layer, scale, sliding_window, softcap, s_aux)
    if current is not None:
        return current.attend(call, query, key, value), None
    record = _RECORD.get()
    if record is not None:
        record[call.layer] = (key, value)
    if attention_mask is None and kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = seen.tril(key.shape[2] - query.shape[2])[None, None]
    mask = attention_mask
    if mask is not None:
        if mask.dtype == torch.bool:  # a padding row has no visible key, and softmax over none is NaN
            mask = mask | ~mask.any(dim=-1, keepdim=True)
        mask = additive(mask, query.dtype)
    mixed = attend(query, key, value, call=call, mask=mask)
    return mixed.transpose(1, 2).contiguous(), None


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as an additive one, 0 for True and -inf for False; return other masks unchanged."""
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


def use_in_decoder(model: Any) -> None:
    """Set our attention in the text decoder; image encoders keep their own."""
    register()
    text = model.config.get_text_config()
    inside = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    if text is not model.config and not inside:
        model.set_attn_implementation(NAME)
        return
    model.set_attn_implementation({"": NAME, **dict.fromkeys(inside, NAME)})


def keep_out_of_compiled_layers() -> None:
    """Let compiled layers call our attention as it is; loads torch's compiler, which takes a second."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(_attention))


def register() -> None:
    """Register our attention with transformers, once."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new shape, 20 to 40 ms each
        AttentionInterface.register(NAME, _attention)
        # without this function transformers would silently pass no mask to any layer
        AttentionMaskInterface.register(NAME, _mask)


def attend(query: Tensor, key: Tensor, value: Tensor, *, call: LayerCall, mask: Tensor | None) -> Tensor:
    """Compute attention of grouped heads.

    `query`: shape (batch, heads, nodes, key_dim). `key`: shape (batch, kv_heads, length, key_dim). `value`: shape
    (batch, kv_heads, length, value_dim). `mask`: additive mask of 0 and -inf, shape (batch, 1, nodes, length) or,
    with rows repeated for every head of a group, (batch, 1, group * nodes, length); None for all keys.
    """
    batch, heads, nodes, _ = query.shape
    group = heads // key.shape[1]
    # the queries of one key head become rows: keys are read once and not repeated
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
class ProbePass:
    """Causal pass without storage that records which layers attend, with their shapes and windows."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    calls: dict[int, LayerCall] = field(default_factory=dict)
    windows_of_masks: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)  # numbers of query heads per key head

    @property
    def windows_of_calls(self) -> set[int]:
        return {call.window for call in self.calls.values() if call.window is not None}

    def note_mask(self, window: int | None) -> None:
        """Record the window of a mask; a window of 0 is that of a mask that no layer uses."""
        if window:
            self.windows_of_masks.add(window)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.shapes[call.layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        self.calls[call.layer] = call
        self.groups.add(query.shape[1] // key.shape[1])
        rows = query.shape[2]
        visible = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=query.device).tril()
        mixed = attend(query, key, value, call=call, mask=additive(visible, query.dtype))
        return mixed.transpose(1, 2).contiguous()


class NoAttention:
    """Pass without attention: its result is 0."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def note_mask(self, window: int | None) -> None:
        """Do nothing."""


@torch.inference_mode()
def windows_of_masks(model: Any) -> set[int]:
    """Return the windows of a model's own masks; its attention implementation is unchanged afterwards."""
    if not model._can_set_attn_implementation():
        return set()
    config = model.config.get_text_config()
    before, probe = config._attn_implementation, ProbePass()
    use_in_decoder(model)
    try:
        # masks are made before the layers run, and a layer may need the mask that is missing here
        with announced(probe), suppress(Exception):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return probe.windows_of_masks


MAX_BATCHED_ROWS = 64  # maximum rows of a job in a shared block; padding others to a longer job costs more than a call


@dataclass(slots=True)
class Block:
    """Jobs of neighbouring slots that attend in one call, padded to the longest of them."""

    slots: slice  # slice of slot indices
    # index of each row in the pass, shape (jobs, nodes); None if the jobs' rows are contiguous and unpadded
    rows: Tensor | None
    first_row: int  # first row of the block
    num_rows: int  # rows of the block without padding
    places: Tensor | None  # indices of the real rows in the padded (jobs * nodes) block; None if nothing is padded
    nodes: int  # rows per job, with padding
    length: int  # number of keys to read
    visible: Tensor | None  # bool of shape (jobs, nodes, length); None if all rows see all keys
    row_positions: Tensor  # position of each row, shape (jobs, nodes)
    key_positions: Tensor  # position of each key, shape (jobs, length)
    deepest: int  # largest position of a row
    causal: bool  # whether the rows are a prompt from its first token
    masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = field(default_factory=dict)
    biased: dict[int, Tensor] = field(default_factory=dict)  # masks with a bias, by the address of the bias

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
        if window is not None and self.deepest >= window:
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
    num_rows: int  # number of rows of sequences; later rows are padding and attend to nothing
    slot_of_row: Tensor | None
    place_of_row: Tensor | None
    only: tuple[int, int] | None
    """Slot and first index, if all rows belong to one sequence and are written as one slice."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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
    return numbers[-1] - numbers[0] == len(numbers) - 1


def plan_pass(
    memory: KVMemory, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], device: torch.device
) -> SlotPass:
    """Return the handler of a pass over these nodes, ascending, of slots that ascend by index."""

    def visible(job: int) -> Tensor | None:
        parents, slot_nodes = slots[job].parents, nodes[job]
        if is_chain(parents) and is_run(slot_nodes) and slot_nodes[-1] == len(parents) - 1:
            return None
        mask = torch.from_numpy(ancestor_mask(parents))
        return mask[slot_nodes[0] : slot_nodes[-1] + 1] if is_run(slot_nodes) else mask[list(slot_nodes)]

    num_rows = sum(map(len, nodes))
    blocks = plan_blocks(slots, nodes, visible, device)
    if len(slots) == 1 and is_run(nodes[0]):
        return SlotPass(memory, blocks, num_rows, None, None, (slots[0].index, slots[0].length + nodes[0][0]))
    slot_of_row = [slot.index for slot, slot_nodes in zip(slots, nodes, strict=True) for _ in slot_nodes]
    place_of_row = [slot.length + node for slot, slot_nodes in zip(slots, nodes, strict=True) for node in slot_nodes]
    return SlotPass(memory, blocks, num_rows, to_device(slot_of_row, device), to_device(place_of_row, device), None)


def plan_blocks(
    slots: Sequence[KVSlot],
    nodes: Sequence[Sequence[int]],
    visible: Callable[[int], Tensor | None],
    device: torch.device,
) -> list[Block]:
    """Divide a pass into blocks.

    `visible` returns the mask of a job's rows in its tree, (rows, nodes); None for the end of a chain.
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
    nodes = max(len(slot_nodes) for slot_nodes in chosen)
    length = max(slot.length + slot.num_tentative for slot in slots)
    mask = torch.zeros(len(slots), nodes, length, dtype=torch.bool)
    row_positions = torch.zeros(len(slots), nodes, dtype=torch.long)
    key_positions = torch.arange(length).repeat(len(slots), 1)
    rows = torch.zeros(len(slots), nodes, dtype=torch.long)
    places: list[int] = []
    row = first_row
    for job, (slot, slot_nodes) in enumerate(zip(slots, chosen, strict=True)):
        count, total = len(slot_nodes), slot.length + slot.num_tentative
        positions = torch.tensor(slot.depths) + (slot.length - 1)
        row_positions[job, :count] = (
            positions[slot_nodes[0] : slot_nodes[-1] + 1] if is_run(slot_nodes) else positions[list(slot_nodes)]
        )
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
        rows=to_device(rows, device) if padded else None,
        first_row=first_row,
        num_rows=len(places),
        places=to_device(places, device) if padded else None,
        nodes=nodes,
        length=length,
        visible=None if bool(mask.all()) else to_device(mask, device, dtype=torch.bool),
        row_positions=to_device(row_positions, device),
        key_positions=to_device(key_positions, device),
        deepest=int(row_positions.max()),
        causal=causal,
    )
