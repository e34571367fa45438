"""Blueprint of one layer of a transformers model, from its modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from draftree.models.native.blueprint import LayerBlueprint, LinearBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.expert_modules import experts_of, has_experts
from draftree.models.native.modules import Names, first_part, linear_of, linears_of, part
from draftree.models.native.queries import ATTENTION
from draftree.models.torch.attention import LayerCall

BEFORE_ATTENTION = ("input_layernorm", "ln_attn", "ln_1", "self_attn_layer_norm")
BEFORE_MLP = ("ln_mlp", "post_attention_layernorm", "ln_2", "final_layer_norm")
OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")
AFTER_ATTENTION = "post_attention_layernorm"
"""Name of a norm before the perceptron, or after attention if there are other names for that or none before it."""
UP = ("fc1", "c_fc", "dense_h_to_4h")
DOWN = ("down_proj", "fc2", "c_proj", "dense_4h_to_h")


def mlp_of(layer: Any) -> Any:
    """Return the module with the perceptron: the layer itself in some families."""
    return layer if hasattr(layer, "fc1") else part(layer, "mlp")


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Modules of the norms of a layer, None for none: before and after attention, before and after the perceptron."""

    attention: Any
    attention_post: Any
    mlp: Any
    mlp_post: Any

    @property
    def any(self) -> Any:
        """One of them."""
        return self.attention if self.attention is not None else self.attention_post


def norms_of(layer: Any) -> LayerNorms:
    """Return the norms of a layer.

    Raises:
        NativeUnavailableError: it has none with a known name.
    """
    first, after = first_part(layer, *BEFORE_ATTENTION), first_part(layer, AFTER_ATTENTION)
    feedforward = first_part(layer, "post_feedforward_layernorm")
    if first is None and after is not None and feedforward is not None:
        return LayerNorms(None, after, None, feedforward)
    first = part(layer, *BEFORE_ATTENTION)
    if hasattr(layer, "pre_feedforward_layernorm"):
        return LayerNorms(first, after, layer.pre_feedforward_layernorm, feedforward)
    if hasattr(layer, "post_self_attn_layernorm"):
        return LayerNorms(first, layer.post_self_attn_layernorm, after, part(layer, "post_mlp_layernorm"))
    second = first_part(layer, *BEFORE_MLP)
    return LayerNorms(first, None, first if second is None else second, None)  # parallel sublayers may share theirs


def up_of(mlp: Any) -> str | None:
    """Return the name of the first product of a perceptron without a gate; None if it has one."""
    found = next((name for name in UP if hasattr(mlp, name)), None)
    is_plain = hasattr(mlp, "up_proj") and not hasattr(mlp, "gate_proj")
    return "up_proj" if found is None and is_plain else found


def describe_layer(
    layer: Any, call: LayerCall, rope: int | None, *, names: Names, factor: float, pairs: int = 0
) -> LayerBlueprint:
    """Return the blueprint of a layer.

    Args:
        layer: module of the layer.
        call: how it calls its attention.
        rope: index of its rotary positions; None for none.
        names: names of the model's parameters.
        factor: of its queries.
        pairs: rotary size of its heads if neighbouring numbers rotate together, otherwise 0.

    Raises:
        NativeUnavailableError: its modules are unknown.
    """
    attention, mlp, norms = part(layer, *ATTENTION), mlp_of(layer), norms_of(layer)

    def norm(module: Any) -> str | None:
        return None if module is None else names.of(module)

    up = up_of(mlp)
    gated = ("gate_proj", "up_proj")
    experts = experts_of(mlp, int(part(norms.any, "weight").numel()), names=names) if has_experts(mlp) else None
    return LayerBlueprint(
        attention_norm=norm(norms.attention),
        attention_post_norm=norm(norms.attention_post),
        mlp_norm=norm(norms.mlp),
        mlp_post_norm=norm(norms.mlp_post),
        query_norm=norm(getattr(attention, "q_norm", None)),
        key_norm=norm(getattr(attention, "k_norm", None)),
        qkv=_queries_keys_values(attention, names=names, pairs=pairs),
        output=linear_of(part(attention, *OUTPUT), "'o_proj'", names=names),
        gate_up=(experts.gate_up,)
        if experts is not None
        else linears_of(mlp, gated if up is None else (up,), ("gate_up_proj",), names=names),
        down=experts.down if experts is not None else linear_of(part(mlp, *DOWN), "'down_proj'", names=names),
        window=call.window,
        scaling=call.scaling * factor,
        rope=rope,
        score_cap=call.softcap,
        sinks=None if call.sinks is None else names.of_parameter(call.sinks),
        experts=experts,
    )


def _queries_keys_values(attention: Any, *, names: Names, pairs: int) -> tuple[LinearBlueprint, ...]:
    """Return the products before attention; heads of one product lie side by side, each with its key and value."""
    fused = first_part(attention, "query_key_value")
    if fused is None:
        found = linears_of(attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj", "c_attn"), names=names)
        if pairs and (len(found) != 3 or hasattr(attention, "q_norm")):
            raise NativeUnavailableError("neighbouring numbers rotate in a fused product, or behind norms of heads")
        return (*(replace(one, pairs=pairs) for one in found[:2]), found[2]) if pairs else found
    whole = linear_of(fused, "'query_key_value'", names=names)
    head_dim = int(part(attention, "head_size", "head_dim"))
    heads = whole.inputs // head_dim
    kv_heads = (whole.outputs // head_dim - heads) // 2
    return (replace(whole, groups=0 if kv_heads == 1 else kv_heads),)


def is_gated(layer: LayerBlueprint) -> bool:
    """Return whether the perceptron of a layer has a gate."""
    return sum(linear.outputs for linear in layer.gate_up) == 2 * layer.down.inputs
