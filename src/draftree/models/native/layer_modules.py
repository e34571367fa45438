"""Blueprint of one layer of a transformers model, from its modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftree.models.native.blueprint import LayerBlueprint, LinearBlueprint
from draftree.models.native.expert_modules import experts_of, has_experts
from draftree.models.native.facts import ModelFacts
from draftree.models.native.modules import Names, first_part, linear_of, linears_of, part
from draftree.models.torch.attention import LayerCall, ProbePass, announced

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
BEFORE_ATTENTION = ("input_layernorm", "ln_attn", "ln_1", "self_attn_layer_norm")
BEFORE_MLP = ("ln_mlp", "post_attention_layernorm", "ln_2", "final_layer_norm")
OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")
UP = ("fc1", "c_fc", "dense_h_to_4h")
DOWN = ("down_proj", "fc2", "c_proj", "dense_4h_to_h")
QUERIES = ("q_proj", "qkv_proj", "c_attn")
QUERY_TOLERANCE = 1e-2
"""Largest relative error of a factor of queries that is one of the usual ones, in half precision."""


def mlp_of(layer: Any) -> Any:
    """Return the module with the perceptron: the layer itself in some families."""
    return layer if hasattr(layer, "fc1") else part(layer, "mlp")


@dataclass(slots=True)
class _Queries(ProbePass):
    """Pass that records the queries of each layer, shape (1, heads, rows, head_dim)."""

    queries: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Record the queries, and attend."""
        self.queries[call.layer] = query
        return ProbePass.attend(self, call, query, key, value)


@torch.inference_mode()
def query_factors(model: ModelFacts, layers: Sequence[Any]) -> dict[int, float]:
    """Return by layer the factor between the product of its queries and the queries with which it attends.

    Some families scale queries before their attention. It is only of use for layers without rotary positions.
    """
    products: dict[int, Tensor] = {}
    hooks = [
        part(part(layer, *ATTENTION), *QUERIES).register_forward_hook(
            lambda module, given, found, index=index: products.setdefault(index, found)
        )
        for index, layer in enumerate(layers)
    ]
    probe = _Queries()
    try:
        with announced(probe):
            model.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for index, queries in probe.queries.items():
        after = queries[0].transpose(0, 1).flatten(1).float()
        before = products[index][0][:, : after.shape[1]].float()
        factor = float((after * before).sum() / before.square().sum().clamp_min(torch.finfo().tiny))
        usual = (1.0, float(queries.shape[-1]) ** -0.5)
        found[index] = next((one for one in usual if abs(factor - one) < QUERY_TOLERANCE * one), factor)
    return found


def describe_layer(layer: Any, call: LayerCall, rope: int | None, *, names: Names, factor: float) -> LayerBlueprint:
    """Return the blueprint of a layer.

    Args:
        layer: module of the layer.
        call: how it calls its attention.
        rope: index of its rotary positions; None for none.
        names: names of the model's parameters.
        factor: of its queries.

    Raises:
        NativeUnavailableError: its modules are unknown.
    """
    attention, mlp = part(layer, *ATTENTION), mlp_of(layer)
    sandwich = hasattr(layer, "pre_feedforward_layernorm")

    def norm(owner: Any, name: str) -> str | None:
        return None if getattr(owner, name, None) is None else names.of(getattr(owner, name))

    up = next((name for name in UP if hasattr(mlp, name)), None)
    gated = ("gate_proj", "up_proj")
    experts = experts_of(mlp, _hidden(layer), names=names) if has_experts(mlp) else None
    first = part(layer, *BEFORE_ATTENTION)
    second = first_part(layer, *BEFORE_MLP) or first  # parallel sublayers may share their norm
    return LayerBlueprint(
        attention_norm=names.of(first),
        attention_post_norm=norm(layer, "post_attention_layernorm") if sandwich else None,
        mlp_norm=names.of(part(layer, "pre_feedforward_layernorm") if sandwich else second),
        mlp_post_norm=norm(layer, "post_feedforward_layernorm") if sandwich else None,
        query_norm=norm(attention, "q_norm"),
        key_norm=norm(attention, "k_norm"),
        qkv=_queries_keys_values(attention, names=names),
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


def _hidden(layer: Any) -> int:
    return int(part(part(layer, *BEFORE_ATTENTION), "weight").numel())


def _queries_keys_values(attention: Any, *, names: Names) -> tuple[LinearBlueprint, ...]:
    """Return the products before attention; heads of one product lie side by side, each with its key and value."""
    fused = first_part(attention, "query_key_value")
    if fused is None:
        return linears_of(attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj", "c_attn"), names=names)
    found = linear_of(fused, "'query_key_value'", names=names)
    head_dim = int(part(attention, "head_size", "head_dim"))
    heads = found.inputs // head_dim
    kv_heads = (found.outputs // head_dim - heads) // 2
    return (replace(found, groups=0 if kv_heads == 1 else kv_heads),)


def is_gated(layer: LayerBlueprint) -> bool:
    """Return whether the perceptron of a layer has a gate."""
    return sum(linear.outputs for linear in layer.gate_up) == 2 * layer.down.inputs
