"""Derivation of the `Blueprint` of a transformers model.

Supported: root-mean-square norms and norms with mean and variance, before the sublayers or after them; grouped-query
attention with rotary or learned positions, optional norms of heads, soft caps and sinks; perceptrons with a gate or
without, and experts; biases; residual connections, also parallel ones. Modules are found by the names that nearly all
families share; the name of the family is not used. The blueprint must account for every parameter, and the native model
is checked against the original logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from draftree.models.native.blueprint import CLAMPED_SILU, LAYER_NORM, Blueprint, LayerBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.expert_modules import activation_module, clamps_of
from draftree.models.native.facts import ModelFacts
from draftree.models.native.layer_modules import BEFORE_MLP, OUTPUT, UP, describe_layer, is_gated, mlp_of, norms_of
from draftree.models.native.modules import (
    Names,
    activation_of,
    first_part,
    linear_of,
    part,
    reads_before,
    runs_before,
)
from draftree.models.native.norms import norm_facts, require_like_norms
from draftree.models.native.queries import ATTENTION, Rotation, query_factors, rotations
from draftree.models.native.rotary import Rope, read_ropes
from draftree.models.torch.attention import ProbePass, announced
from draftree.models.torch.embeddings import scale_of_embedding

LAYERS = ("layers", "h")
LAST_NORM = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
POSITIONS = ("wpe", "embed_positions")
ACTIVATION = ("act_fn", "activation_fn", "act")


def read(model: ModelFacts) -> Blueprint:
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
    if any("dynamic" in str(kind) for kind in _rope_types(config)):
        raise NativeUnavailableError("its rotary positions change with the length of the text")
    if rotary is None and table is None:
        raise NativeUnavailableError(f"{type(base).__name__} has no 'rotary_emb', and no table of positions")
    is_post_norm = _is_post_norm(model, modules[0])
    layers, ropes = _layers(model, modules, rotary, names=names)
    norm = first_part(base, *LAST_NORM)
    facts = norm_facts(norms_of(modules[0]).any if norm is None else norm)
    require_like_norms(inner, [name for layer in layers for name in layer.norms], facts)
    final = None if norm is None else names.of(norm)
    if is_post_norm:
        if final is not None:
            raise NativeUnavailableError("it has norms after its sublayers and one after the last of these")
        layers, final = norms_after(layers, None)
    embedding = inner.get_input_embeddings()
    mlps = [mlp_of(module) for module in modules]
    activation, limit, slope = _activation(mlps)
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
        mlp=max(layer.down.inputs if layer.experts is None else layer.experts.widest for layer in layers),
        vocab=model.vocab_size,
        activation=activation,
        epsilon=facts.epsilon,
        norm_offset=facts.offset,
        embedding_scale=scale_of_embedding(embedding, config),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_scale=_logit_scale(config),
        embedding=names.of(embedding),
        final_norm=final,
        head=linear_of(inner.get_output_embeddings(), "the head", names=names),
        ropes=ropes,
        layers=layers,
        norm=facts.kind,
        has_norm_bias=facts.has_bias,
        is_post_norm=is_post_norm,
        is_gated=is_gated(layers[0]),
        is_parallel=_is_parallel(model, modules[0]),
        has_joint_norms=_has_joint_norms(layers, names, head_dim),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        gate_limit=limit,
        gate_slope=slope,
        positions=None if table is None else names.of(table),
        position_offset=offset,
    )
    require_sizes(found, names)
    require_nothing_else(names, found)
    return found


def _layers(
    model: ModelFacts, modules: Sequence[Any], rotary: Any, *, names: Names
) -> tuple[tuple[LayerBlueprint, ...], tuple[Rope, ...]]:
    """Return the blueprints of all layers, and the kinds of rotary positions that they use."""
    of_layers = _kinds(rotary, model.config, modules)
    kinds = tuple(dict.fromkeys(kind for kind in of_layers if kind is not None))
    ropes = read_ropes(rotary, kinds, context=model.max_length)
    numbers = [None if kind is None else kinds.index(kind) for kind in of_layers]
    turned = rotations(model, modules, ropes, numbers)
    numbers = [None if one is Rotation.NONE else number for one, number in zip(turned, numbers, strict=True)]
    factors = query_factors(model, modules) if None in numbers else {}
    layers = tuple(
        describe_layer(
            layer,
            model.calls[index],
            number,
            names=names,
            factor=factors.get(index, 1.0) if number is None else 1.0,
            pairs=2 * len(ropes[number].frequencies) if number is not None and turned[index] is Rotation.PAIRS else 0,
        )
        for index, (layer, number) in enumerate(zip(modules, numbers, strict=True))
    )
    return layers, ropes


def _logit_scale(config: Any) -> float:
    """Return the factor of the logits, which families give as a factor or as a divisor."""
    factor = getattr(config, "logit_scale", None)
    return 1.0 / float(getattr(config, "logits_scaling", 1.0)) if factor is None else float(factor)


def _has_joint_norms(layers: Sequence[LayerBlueprint], names: Names, head_dim: int) -> bool:
    """Return whether the norms of queries and keys are over all heads together."""
    norms = [name for layer in layers for name in (layer.query_norm, layer.key_norm) if name is not None]
    return any(names.parameters[name].numel() != head_dim for name in norms)


def _head_dim(config: Any) -> int:
    if getattr(config, "_heterogeneity_spec", None) is not None:
        raise NativeUnavailableError("its layers have sizes of their own")
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


def _is_post_norm(model: ModelFacts, layer: Any) -> bool:
    """Return whether the norms of a layer follow its sublayers, by the order in which its modules run."""
    norm, attention = norms_of(layer).any, part(layer, *ATTENTION)
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


def _is_parallel(model: ModelFacts, layer: Any) -> bool:
    """Return whether the perceptron of a layer does not read what its attention adds.

    Only a layer without a second norm, or with norms of mean and variance, can be such a layer.
    """
    if first_part(layer, *BEFORE_MLP) is not None and norm_facts(norms_of(layer).any).kind != LAYER_NORM:
        return False
    mlp = mlp_of(layer)

    def run() -> None:
        with announced(ProbePass()):
            model.model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)

    return reads_before(run, part(part(layer, *ATTENTION), *OUTPUT), part(mlp, *UP, "gate_up_proj", "up_proj"))


def _activation(mlps: Sequence[Any]) -> tuple[int, float, float]:
    """Return the activation of all layers, and limit and slope of gates that are clamped."""
    clamps = {clamps_of(mlp) for mlp in mlps}
    if clamps == {None}:
        return activation_of([part(activation_module(mlp), *ACTIVATION) for mlp in mlps]), 0.0, 0.0
    (clamp,) = clamps if len(clamps) == 1 else (None,)
    if clamp is None:
        raise NativeUnavailableError("the gates of its layers are clamped in different ways")
    return CLAMPED_SILU, *clamp


def require_sizes(found: Blueprint, names: Names) -> None:
    """Check that the C library can compute layers of these sizes.

    Raises:
        NativeUnavailableError: it cannot.
    """
    inner = {size for layer in found.layers for size in _inner_sizes(layer)}
    units = [("hidden size", found.hidden, 16), ("size of a head", found.head_dim, 16)]
    for name, size, unit in (*units, *(("inner size", size, 32) for size in sorted(inner))):
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
        if sizes != (heads, found.heads * found.head_dim, wide * layer.down.inputs, layer.down.inputs):
            raise NativeUnavailableError(f"a layer has projections of the sizes {sizes}")
        norms = [
            (layer.query_norm, found.heads if found.has_joint_norms else 1),
            (layer.key_norm, found.kv_heads if found.has_joint_norms else 1),
        ]
        if any(norm and names.parameters[norm].shape != (count * found.head_dim,) for norm, count in norms):
            raise NativeUnavailableError("it normalizes queries and keys in parts of another size")
    if len(found.ropes) > 2:
        raise NativeUnavailableError(f"it has {len(found.ropes)} kinds of rotary positions")


def _inner_sizes(layer: LayerBlueprint) -> set[int]:
    shared = None if layer.experts is None else layer.experts.shared_down
    return {layer.down.inputs} | (set() if shared is None else {shared.inputs})


def require_nothing_else(names: Names, found: Blueprint) -> None:
    """Check that the blueprint accounts for every parameter.

    Raises:
        NativeUnavailableError: some have an unknown use.
    """
    strange = [name for name in names.parameters if name not in found.names]
    if strange:
        raise NativeUnavailableError(f"{len(strange)} of its parameters are of unknown use ({strange[0]}, …)")
