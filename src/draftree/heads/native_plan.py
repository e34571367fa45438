"""Blueprints of EAGLE-3 heads for the C decoder, and their weights.

The first layer is a joined layer: its attention reads the normed embedding and the normed state before a row. The
residual stream starts at that state, or at the product of the target's hidden states, `fc`.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from draftree.heads.base import FeatureHead
from draftree.heads.config import EAGLE3, HeadConfig
from draftree.heads.eagle import Eagle3Head
from draftree.models.native.blueprint import (
    GELU_TANH,
    SILU,
    Blueprint,
    LayerBlueprint,
    LinearBlueprint,
    ProjectionBlueprint,
)
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.lowering import DTYPES
from draftree.models.native.rotary import Rope
from draftree.models.native.weights import Weights

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}
EMBEDDING, NORM, OUTPUT = "embed_tokens.weight", "norm.weight", "lm_head.weight"


def plan_head(head: FeatureHead) -> Blueprint:
    """Return the blueprint of a head.

    Raises:
        NativeUnavailableError: its kind, sizes, activation, dtype or device is not supported.
    """
    if not isinstance(head, Eagle3Head) or head.config.kind != EAGLE3:
        raise NativeUnavailableError(f"passes in C are for heads of kind 'eagle3', not '{head.config.kind}'")
    config, dtype = head.config, str(head.dtype).removeprefix("torch.")
    device = next(head.parameters()).device
    if device.type != "cpu" or dtype not in DTYPES:
        raise NativeUnavailableError(f"passes in C are for float32 and bfloat16 on CPUs, not {dtype} on {device}")
    if not config.num_layers:
        raise NativeUnavailableError("it has no layers")
    if config.activation not in ACTIVATIONS:
        raise NativeUnavailableError(
            f"its activation is {config.activation}: passes in C have {', '.join(ACTIVATIONS)}"
        )
    units = {
        "hidden size": (config.hidden, 16),
        "target's hidden size": (config.target_hidden, 16),
        "size of a head": (config.head_dim, 16),
    }
    for name, (size, unit) in {**units, "inner size": (config.intermediate, 32)}.items():
        if size % unit:
            raise NativeUnavailableError(f"its {name} of {size} is no multiple of {unit}")
    return Blueprint(
        kind=config.kind,
        fingerprint="",
        context=config.max_length,
        dtype=dtype,
        hidden=config.hidden,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate,
        vocab=config.draft_vocab_size,
        activation=ACTIVATIONS[config.activation],
        epsilon=config.epsilon,
        norm_offset=0.0,
        embedding_scale=1.0,
        residual_scale=1.0,
        logit_scale=1.0,
        embedding=EMBEDDING,
        final_norm=NORM,
        head=LinearBlueprint(OUTPUT, None, config.hidden, config.draft_vocab_size),
        ropes=(Rope(head.rotary.frequencies, head.rotary.scaling),),
        layers=tuple(_layer(head, index) for index in range(config.num_layers)),
        projection=_projection(config),
    )


def _projection(config: HeadConfig) -> ProjectionBlueprint:
    count = len(config.features)
    bias = "fc.bias" if config.fc_bias else None
    norms = [f"fc_norm.{i}.weight" for i in range(count)] if config.fc_norm else []
    norms = ["input_norm.weight"] if config.norm_before_fc else norms
    return ProjectionBlueprint(
        LinearBlueprint("fc.weight", bias, count * config.target_hidden, config.hidden), tuple(norms)
    )


def _layer(head: Eagle3Head, index: int) -> LayerBlueprint:
    config, name = head.config, f"layers.{index}"
    joins = index == 0
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = 2 * config.hidden if joins else config.hidden

    def linear(part: str, inputs: int, outputs: int, *, has_bias: bool = False) -> LinearBlueprint:
        bias = f"{name}.{part}.bias" if has_bias else None
        return LinearBlueprint(f"{name}.{part}.weight", bias, inputs, outputs)

    qkv = (("q", queries), ("k", keys), ("v", keys))
    return LayerBlueprint(
        attention_norm=f"{name}.hidden_norm.weight" if joins else f"{name}.input_layernorm.weight",
        attention_post_norm=None,
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp_post_norm=None,
        query_norm=f"{name}.self_attn.q_norm.weight" if config.qk_norm else None,
        key_norm=f"{name}.self_attn.k_norm.weight" if config.qk_norm else None,
        qkv=tuple(linear(f"self_attn.{p}_proj", width, size, has_bias=config.attention_bias) for p, size in qkv),
        output=linear("self_attn.o_proj", queries, config.hidden, has_bias=config.output_bias),
        gate_up=tuple(
            linear(f"mlp.{p}_proj", config.hidden, config.intermediate, has_bias=config.mlp_bias)
            for p in ("gate", "up")
        ),
        down=linear("mlp.down_proj", config.intermediate, config.hidden, has_bias=config.mlp_bias),
        window=None,
        scaling=config.head_dim**-0.5,
        rope=0,
        embedding_norm=f"{name}.input_layernorm.weight" if joins else None,
        is_normed_residual=joins and config.norm_before_residual,
    )


@final
class HeadWeights(Weights):
    """Weights of a head and of what it shares with its target. Own ones are emptied once they are packed.

    Args:
        head: the head, bound to its target.
    """

    def __init__(self, head: Eagle3Head) -> None:
        self._head = head
        self._own: dict[str, Tensor] = dict(head.named_parameters())

    def get(self, name: str) -> Tensor:
        """Return a weight."""
        if name in self._own:
            return self._own[name].detach()
        return self._head.embedding_weight() if name == EMBEDDING else self._head.output_weight()

    def release(self, name: str) -> None:
        """Empty a parameter, or forget the rows of the target's output head."""
        weight = self._own.pop(name, None)
        if weight is None:
            if name == OUTPUT:
                self._head.forget_output()
            return
        owner, _, attribute = name.rpartition(".")
        empty = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        setattr(self._head.get_submodule(owner), attribute, empty)

    def lends(self, name: str) -> bool:
        """Return whether the target owns the embedding."""
        return name == EMBEDDING and name not in self._own
