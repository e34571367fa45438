"""Our attention: rows of many sequences, each attending to its slot's prefix and its own ancestors.

Registered with transformers once. A context variable holds the current pass; without one, the call is computed with the
mask of transformers, so a model that the user shares with us works outside our passes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.kv.slots import LayerShape

NAME = "draftree"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Arguments of one layer's attention besides queries, keys and values.

    Attributes:
        layer: index of the layer.
        scaling: factor of the scores.
        window: size of its sliding window; None for all tokens.
        softcap: soft cap of the scores; None for none.
        sinks: logits of the sinks, one for each head; None for none.
        bias: added to the scores by distance in positions, shape (heads, distances); None for none.
    """

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None = None


class Pass(Protocol):
    """Handler of the attention calls of one forward pass."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; arguments have shape (1, heads, rows, head_dim), the result (1, rows, heads, head_dim)."""

    def note_mask(self, window: int | None) -> None:
        """Record the window of a requested mask; the pass computes masks itself."""


_CURRENT: ContextVar[Pass | None] = ContextVar("draftree_pass", default=None)
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
def recorded() -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Record keys and values of calls outside of passes by layer, shape (batch, kv_heads, rows, dim)."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    token = _RECORD.set(found)
    try:
        yield found
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
    # attentions outside of the decoder, such as those of images, may have no layer index
    call = LayerCall(int(getattr(module, "layer_idx", -1)), scale, sliding_window, softcap, s_aux)
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


def register() -> None:
    """Register our attention with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    # without this function transformers would silently pass no mask to any layer
    AttentionMaskInterface.register(NAME, _mask)


def attend(query: Tensor, key: Tensor, value: Tensor, *, call: LayerCall, mask: Tensor | None) -> Tensor:
    """Compute attention of grouped heads.

    Args:
        query: shape (batch, heads, nodes, key_dim).
        key: shape (batch, kv_heads, length, key_dim).
        value: shape (batch, kv_heads, length, value_dim).
        call: scaling, soft cap and sinks of the layer.
        mask: additive mask of 0 and -inf, shape (batch, 1, nodes, length) or, with rows repeated for every head of a
            group, (batch, 1, group * nodes, length); None for all keys.

    Returns:
        Shape (batch, heads, nodes, value_dim).
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

    @property
    def windows_of_calls(self) -> set[int]:
        """Windows of the calls."""
        return {call.window for call in self.calls.values() if call.window is not None}

    def note_mask(self, window: int | None) -> None:
        """Record the window of a mask; a window of 0 is that of a mask that no layer uses."""
        if window:
            self.windows_of_masks.add(window)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention among the rows of the pass."""
        self.shapes[call.layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        self.calls[call.layer] = call
        rows = query.shape[2]
        visible = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=query.device).tril()
        mixed = attend(query, key, value, call=call, mask=additive(visible, query.dtype))
        return mixed.transpose(1, 2).contiguous()


@torch.inference_mode()
def windows_of_masks(model: Any) -> set[int]:
    """Return the windows of a model's own masks; its attention implementation is unchanged afterwards."""
    if not model._can_set_attn_implementation():
        return set()
    config = model.config.get_text_config()
    before, probe = config._attn_implementation, ProbePass()
    use_in_decoder(model)
    try:
        with announced(probe):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return probe.windows_of_masks
