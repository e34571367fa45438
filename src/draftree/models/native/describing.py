"""Derivation of the `Blueprint` of a transformers model.

Supported: root-mean-square norms and norms with mean and variance, before the sublayers or after them; grouped-query
attention with rotary or learned positions and optional norms per head; perceptrons with a gate or without; biases;
residual connections. Modules are found by the names that nearly all families share; the name of the family is not used.
The blueprint must account for every parameter, and the native model is checked against the original logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from draftree.models.native.blueprint import LAYER_NORM, Blueprint, LayerBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.modules import Names, activation_of, first_part, linear_of, linears_of, part, runs_before
from draftree.models.native.norms import norm_facts, require_like_norms
from draftree.models.native.rotary import read_ropes
from draftree.models.torch.attention import LayerCall, ProbePass, announced
from draftree.models.torch.embeddings import scale_of_embedding
from draftree.models.torch.hf import HFModel

LAYERS = ("layers", "h")
ATTENTION = ("self_attn", "attn")
BEFORE_ATTENTION = ("input_layernorm", "ln_1", "self_attn_layer_norm")
BEFORE_MLP = ("post_attention_layernorm", "ln_2", "final_layer_norm")
LAST_NORM = ("norm", "ln_f", "final_layer_norm")
POSITIONS = ("wpe", "embed_positions")
QUERIES = ("q_proj", "qkv_proj", "c_attn")
QUERY_TOLERANCE = 1e-2
"""Largest relative error of a factor of queries that is one of the usual ones, in half precision."""
ACTIVATION = ("act_fn", "activation_fn", "act")


def read(model: HFModel) -> Blueprint:
    """Derive the blueprint of a model.

    Args:
        model: the wrapped model, with its weights.

    Raises:
        NativeUnavailableError: the architecture is not supported; the message has the reason.
    """
    names = Names(model.model)
    config, inner, base = model.config, model.model, model.model.base_model
    base = base if first_part(base, *LAYERS) is not None else part(base, "decoder")
    modules = list(part(base, *LAYERS))
    heads, head_dim = int(config.num_attention_heads), _head_dim(config)
    rotary, table = first_part(base, "rotary_emb"), _position_table(base)
    of_layers = _kinds(rotary, config, modules)
    kinds = tuple(dict.fromkeys(kind for kind in of_layers if kind is not None))
    if any("dynamic" in str(kind) for kind in _rope_types(config)):
        raise NativeUnavailableError("its rotary positions change with the length of the text")
    if rotary is None and table is None:
        raise NativeUnavailableError(f"{type(base).__name__} has no 'rotary_emb', and no table of positions")
    is_post_norm = _is_post_norm(model, modules[0])
    factors = _query_factors(model, modules) if None in of_layers else {}
    layers = tuple(
        _layer(
            layer,
            model.calls[index],
            None if kind is None else kinds.index(kind),
            names=names,
            factor=factors.get(index, 1.0) if kind is None else 1.0,
        )
        for index, (layer, kind) in enumerate(zip(modules, of_layers, strict=True))
    )
    norm = first_part(base, *LAST_NORM)
    facts = norm_facts(part(modules[0], *BEFORE_ATTENTION) if norm is None else norm)
    require_like_norms(inner, [name for layer in layers for name in layer.norms], facts)
    final = None if norm is None else names.of(norm)
    if is_post_norm:
        if final is not None:
            raise NativeUnavailableError("it has norms after its sublayers and one after the last of these")
        layers, final = norms_after(layers, None)
    embedding = inner.get_input_embeddings()
    if getattr(config, "final_logit_softcapping", None):
        raise NativeUnavailableError("its logits are capped")
    offset = 0 if table is None else int(getattr(table, "offset", 0))
    rows = model.max_length if table is None else int(table.weight.shape[0]) - offset
    found = Blueprint(
        kind=model.kind,
        fingerprint=model.fingerprint,
        context=min(model.max_length, rows),
        dtype=str(model.dtype).removeprefix("torch."),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=(sum(linear.outputs for linear in layers[0].qkv) // head_dim - heads) // 2,
        head_dim=head_dim,
        mlp=layers[0].down.inputs,
        vocab=model.vocab_size,
        activation=activation_of([part(_mlp(module), *ACTIVATION) for module in modules]),
        epsilon=facts.epsilon,
        norm_offset=facts.offset,
        embedding_scale=scale_of_embedding(embedding, config),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        embedding=names.of(embedding),
        final_norm=final,
        head=linear_of(inner.get_output_embeddings(), "the head", names=names),
        ropes=read_ropes(rotary, kinds, context=model.max_length),
        layers=layers,
        norm=facts.kind,
        has_norm_bias=facts.has_bias,
        is_post_norm=is_post_norm,
        is_gated=is_gated(layers[0]),
        positions=None if table is None else names.of(table),
        position_offset=offset,
    )
    require_sizes(found, names)
    require_nothing_else(names, found)
    return found


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _position_table(base: Any) -> nn.Embedding | None:
    """Return the table that is added to embeddings by position; None for none."""
    found = first_part(base, *POSITIONS)
    if found is not None and not isinstance(found, nn.Embedding):
        raise NativeUnavailableError(f"its positions are a {type(found).__name__}, not a table")
    return found


def _kinds(rotary: Any, config: Any, layers: Sequence[Any]) -> Sequence[str | None]:
    """Return each layer's kind of rotary positions; "" if there is only one, None for none."""
    if rotary is None:
        return [None] * len(layers)
    known = [""] * len(layers)
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        known = [str(kind) for kind in config.layer_types]
    uses = [getattr(part(layer, *ATTENTION), "use_rope", True) for layer in layers]
    return [kind if used else None for kind, used in zip(known, uses, strict=True)]


def _rope_types(config: Any) -> list[Any]:
    settings = getattr(config, "rope_parameters", None) or {}
    own = [settings] if "rope_type" in settings else [rope for rope in settings.values() if isinstance(rope, dict)]
    return [rope.get("rope_type") for rope in own]


def _is_post_norm(model: HFModel, layer: Any) -> bool:
    """Return whether the norms of a layer follow its sublayers, by the order in which its modules run."""
    norm, attention = part(layer, *BEFORE_ATTENTION), part(layer, *ATTENTION)
    if norm_facts(norm).kind != LAYER_NORM:
        return False

    def run() -> None:
        with announced(ProbePass()):
            model.model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)

    return not runs_before(run, norm, attention)


def norms_after(layers: Sequence[LayerBlueprint], first: str | None) -> tuple[tuple[LayerBlueprint, ...], str | None]:
    """Return layers whose norms follow their sublayers as layers with norms before them, and the last norm.

    Args:
        layers: layers, whose `attention_norm` is the one after attention, and so on.
        first: norm before the first layer.
    """
    found, before = [], first
    for layer in layers:
        found.append(layer.with_norms_of(before))
        before = layer.mlp_norm
    return tuple(found), before


def _mlp(layer: Any) -> Any:
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
def _query_factors(model: HFModel, layers: Sequence[Any]) -> dict[int, float]:
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


def _layer(layer: Any, call: LayerCall, rope: int | None, *, names: Names, factor: float) -> LayerBlueprint:
    attention, mlp = part(layer, *ATTENTION), _mlp(layer)
    if call.softcap is not None or call.sinks is not None:
        raise NativeUnavailableError("its attention has capped scores or sinks")
    sandwich = hasattr(layer, "pre_feedforward_layernorm")

    def norm(owner: Any, name: str) -> str | None:
        return None if getattr(owner, name, None) is None else names.of(getattr(owner, name))

    up = next((name for name in ("fc1", "c_fc") if hasattr(mlp, name)), None)
    gated = ("gate_proj", "up_proj")
    return LayerBlueprint(
        attention_norm=names.of(part(layer, *BEFORE_ATTENTION)),
        attention_post_norm=norm(layer, "post_attention_layernorm") if sandwich else None,
        mlp_norm=names.of(part(layer, *(("pre_feedforward_layernorm",) if sandwich else BEFORE_MLP))),
        mlp_post_norm=norm(layer, "post_feedforward_layernorm") if sandwich else None,
        query_norm=norm(attention, "q_norm"),
        key_norm=norm(attention, "k_norm"),
        qkv=linears_of(attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj", "c_attn"), names=names),
        output=linear_of(part(attention, "o_proj", "out_proj", "c_proj"), "'o_proj'", names=names),
        gate_up=linears_of(mlp, gated if up is None else (up,), ("gate_up_proj",), names=names),
        down=linear_of(part(mlp, "down_proj", "fc2", "c_proj"), "'down_proj'", names=names),
        window=call.window,
        scaling=call.scaling * factor,
        rope=rope,
    )


def is_gated(layer: LayerBlueprint) -> bool:
    """Return whether the perceptron of a layer has a gate."""
    return sum(linear.outputs for linear in layer.gate_up) == 2 * layer.down.inputs


def require_sizes(found: Blueprint, names: Names) -> None:
    """Check that the C library can compute layers of these sizes.

    Raises:
        NativeUnavailableError: it cannot.
    """
    units = {"hidden size": (found.hidden, 16), "size of a head": (found.head_dim, 16), "inner size": (found.mlp, 32)}
    for name, (size, unit) in units.items():
        if size % unit:
            raise NativeUnavailableError(f"its {name} of {size} is no multiple of {unit}")
    heads, wide = (found.heads + 2 * found.kv_heads) * found.head_dim, 2 if found.is_gated else 1
    for layer in found.layers:
        sizes = (
            sum(linear.outputs for linear in layer.qkv),
            layer.output.inputs,
            sum(linear.outputs for linear in layer.gate_up),
            layer.down.inputs,
        )
        if sizes != (heads, found.heads * found.head_dim, wide * found.mlp, found.mlp):
            raise NativeUnavailableError(f"a layer has projections of the sizes {sizes}")
        norms = [name for name in (layer.query_norm, layer.key_norm) if name is not None]
        if any(names.parameters[norm].numel() != found.head_dim for norm in norms):
            raise NativeUnavailableError("it normalizes queries and keys of all heads together")
    if len(found.ropes) > 2:
        raise NativeUnavailableError(f"it has {len(found.ropes)} kinds of rotary positions")


def require_nothing_else(names: Names, found: Blueprint) -> None:
    """Check that the blueprint accounts for every parameter.

    Raises:
        NativeUnavailableError: some have an unknown use.
    """
    strange = [name for name in names.parameters if name not in found.names]
    if strange:
        raise NativeUnavailableError(f"{len(strange)} of its parameters are of unknown use ({strange[0]}, …)")
