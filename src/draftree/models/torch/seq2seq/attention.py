"""Attention of encoder-decoder models: the decoder's calls go to the current pass, all others to transformers.

transformers calls one attention function for the encoder, for self-attention and for cross-attention. Which module is
which is learned once, by a pass over a source and a text of different lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from draftree.models.torch.attention import LayerCall

NAME = "draftree_seq2seq"
PLAIN = "sdpa"
"""The implementation of transformers for calls outside of passes."""


class DecoderCalls(Protocol):
    """Handler of the attention calls of one pass of a decoder."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, given: dict[str, Any]
    ) -> Tensor:
        """Attend; queries have shape (1, heads, rows, head_dim), the result (1, rows, heads, head_dim)."""

    def positions_of(self) -> tuple[Tensor, Tensor] | None:
        """Return tokens and positions of the rows, shape (rows,); None to leave positions to the model."""

    def bias_of(self, module: nn.Module) -> bool:
        """Note that a module's bias by position is wanted; returns whether the pass computes it itself."""


_CURRENT: ContextVar[DecoderCalls | None] = ContextVar("draftree_seq2seq_pass", default=None)


def current_calls() -> DecoderCalls | None:
    """Return the handler of the current pass; None outside of passes."""
    return _CURRENT.get()


@contextmanager
def announced(calls: DecoderCalls) -> Iterator[None]:
    """Route the decoder's attention calls inside to this handler."""
    token = _CURRENT.set(calls)
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
    **given: Any,
) -> tuple[Tensor, None]:
    current = _CURRENT.get()
    if current is not None:
        return current.attend(module, query, key, value, scaling, given), None
    return plain_attention(module, query, key, value, attention_mask, scaling=scaling, **given), None


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any
) -> Tensor:
    """Return what transformers computes, shape (batch, rows, heads, head_dim)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mixed: Tensor = ALL_ATTENTION_FUNCTIONS[PLAIN](module, query, key, value, mask, **given)[0]
    return mixed


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if _CURRENT.get() is not None:
        return None
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


def use_in(model: Any) -> None:
    """Set our attention in encoder and decoder."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)


@dataclass(slots=True)
class RecordedCalls:
    """Pass over one text on one source, computed by transformers, that records keys and values of each module.

    Attributes:
        keys: keys and values by module, shape (1, heads, length, head_dim), in the order of the calls.
        biased: modules that asked for a bias by position.
    """

    keys: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    biased: list[nn.Module] = field(default_factory=list)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, given: dict[str, Any]
    ) -> Tensor:
        """Record keys and values, and attend as transformers does."""
        self.keys[module] = (key, value)
        return plain_attention(module, query, key, value, None, scaling=scaling, **given)

    def positions_of(self) -> tuple[Tensor, Tensor] | None:
        """Leave positions to the model."""
        return None

    def bias_of(self, module: nn.Module) -> bool:
        """Leave the bias to the model."""
        self.biased.append(module)
        return False


def layer_call(
    layer: int, query: Tensor, scaling: float | None, given: dict[str, Any], bias: Tensor | None
) -> LayerCall:
    """Return the arguments of a layer's call."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return LayerCall(layer, scale, given.get("sliding_window"), given.get("softcap"), given.get("s_aux"), bias)
