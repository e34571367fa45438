"""What the derivation of a blueprint reads of a transformers model besides its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.modules import first_part
from draftree.models.torch.attention import LayerCall
from draftree.models.torch.context import context_length
from draftree.models.torch.hf import HFModel
from draftree.models.torch.identity import fingerprint


class ModelFacts(Protocol):
    """A transformers model and facts about it. `HFModel` has them, too."""

    model: Any
    config: Any
    vocab_size: int
    max_length: int
    device: torch.device
    dtype: torch.dtype
    fingerprint: str

    @property
    def kind(self) -> str:
        """Name in messages."""
        ...

    @property
    def calls(self) -> Mapping[int, LayerCall]:
        """Arguments of the attention of each layer."""
        ...


class OwnAttention:
    """Facts of a model that computes its attention itself: softmax of all earlier scores over the root of a head.

    That it does is found by comparison of logits, like everything else that passes in C assume.

    Args:
        model: a `…ForCausalLM` with rotary positions.

    Raises:
        NativeUnavailableError: its scores depend on distances.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.config = model.eval(), model.config.get_text_config()
        if getattr(self.config, "alibi", False):
            raise NativeUnavailableError("its attention adds distances to scores")
        self.vocab_size, self.max_length = int(self.config.vocab_size), context_length(self.config)
        self.device, self.dtype = model.device, next(model.parameters()).dtype
        self.fingerprint = fingerprint(model)
        self.kind = type(model).__name__
        scaling = float(self.config.hidden_size // self.config.num_attention_heads) ** -0.5
        layers = range(int(self.config.num_hidden_layers))
        self.calls = {layer: LayerCall(layer, scaling, window=None, softcap=None, sinks=None) for layer in layers}


def facts_of(model: Any) -> ModelFacts:
    """Return the facts of a model.

    Args:
        model: a `…ForCausalLM` in evaluation mode. Its attention implementation is set to ours where it has one.

    Raises:
        NativeUnavailableError: its attention is not supported.
        UnsupportedModelError: as for `HFModel`.
    """
    layers = first_part(model.base_model, "h")
    attention = first_part(layers[0], "self_attention") if layers is not None and len(layers) else None
    if hasattr(attention, "query_key_value") and first_part(model.base_model, "rotary_emb") is not None:
        return OwnAttention(model)
    return HFModel(model)
