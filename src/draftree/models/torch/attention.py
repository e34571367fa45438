"""Our attention: rows of many sequences, each seeing its slot's prefix and its own ancestors.

Registered with transformers once. A pass is announced by a context variable; without one, the call is answered
plainly with the mask that transformers made, so a model that a user shares with us still works for the user.
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
_RECORD: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("draftree_record", default=None)


@contextmanager
def announced(current: Pass) -> Iterator[None]:
    """Attention calls inside go to this pass."""
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def recorded() -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Keys and values of the calls inside that are of no pass, by layer: shape (batch, kv_heads, rows, dim)."""
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
    # attentions outside of the decoder, such as those of images, need not know their layer
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
        if mask.dtype == torch.bool:  # a row of padding sees nothing, and softmax of nothing is NaN
            mask = mask | ~mask.any(dim=-1, keepdim=True)
        mask = additive(mask, query.dtype)
    mixed = attend(query, key, value, call=call, mask=mask)
    return mixed.transpose(1, 2).contiguous(), None


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to scores: 0 where it is True, -inf elsewhere; other masks as they are."""
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
    """Set our attention in the layers that write text; what reads images keeps its own."""
    register()
    text = model.config.get_text_config()
    inside = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    if text is not model.config and not inside:
        model.set_attn_implementation(NAME)
        return
    model.set_attn_implementation({"": NAME, **dict.fromkeys(inside, NAME)})


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
class ProbePass:
    """A causal pass that stores nothing: it learns which layers attend, with which shapes and windows."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    calls: dict[int, LayerCall] = field(default_factory=dict)
    windows_of_masks: set[int] = field(default_factory=set)

    @property
    def windows_of_calls(self) -> set[int]:
        """Windows that layers keep to."""
        return {call.window for call in self.calls.values() if call.window is not None}

    def note_mask(self, window: int | None) -> None:
        """A window that some layer must keep to."""
        if window is not None:
            self.windows_of_masks.add(window)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Plain causal attention among the rows of the pass."""
        self.shapes[call.layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        self.calls[call.layer] = call
        rows = query.shape[2]
        visible = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=query.device).tril()
        mixed = attend(query, key, value, call=call, mask=additive(visible, query.dtype))
        return mixed.transpose(1, 2).contiguous()


@torch.inference_mode()
def windows_of_masks(model: Any) -> set[int]:
    """Windows of the masks that a model makes for itself; its attention implementation stays what it was."""
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
