"""Derivation of the `Blueprint` of a transformers model.

Supported: root-mean-square norms and norms with mean and variance, before the sublayers or after them; grouped-query
attention with rotary or learned positions, optional norms of heads, soft caps and sinks; perceptrons with a gate or
without, and experts; biases; residual connections, also parallel ones. Modules are found by the names that nearly all
families share; the name of the family is not used. The blueprint must account for every parameter, and the native model
is checked against the original logits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from draftree.models.native.beside import beside, has_adapters, unfolded
from draftree.models.native.blueprint import (
    CLAMPED_SILU,
    LAYER_NORM,
    Blueprint,
    LayerBlueprint,
    LinearBlueprint,
    MixerBlueprint,
    OutputPart,
    QueryScaling,
    Rope,
    read_ropes,
)
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.latent import LatentSizes, is_latent, require_latent_sizes, with_latent_attention
from draftree.models.native.mixers import convolution_of, describe_mixer, recurrent_mixer
from draftree.models.native.modules import (
    Names,
    activation_module,
    activation_of,
    clamps_of,
    experts_of,
    first_part,
    gated_activation_of,
    has_experts,
    linear_of,
    linears_of,
    norm_facts,
    part,
    reads_before,
    require_like_norms,
    runs_before,
    scaled,
)
from draftree.models.torch.attention import LayerCall, ProbePass, announced, numbered, use_in_decoder
from draftree.models.torch.hf import HFModel
from draftree.models.torch.inspection import context_length, fingerprint, rope_settings
from draftree.models.torch.layers import scale_of_embedding


class OwnAttention:
    """Facts of a model that computes its attention itself: softmax of all earlier scores over the root of a head.

    That it does is found by comparison of logits, like everything else that native kernels assume.
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


class HybridFacts:
    """Facts of a model of which some layers mix tokens by a state, and the others with our attention."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model.eval(), model.config.get_text_config()
        self.vocab_size, self.max_length = int(self.config.vocab_size), context_length(self.config)
        self.device, self.dtype = model.device, next(model.parameters()).dtype
        self.fingerprint = fingerprint(model)
        self.kind = type(model).__name__
        use_in_decoder(model)
        probe, (layers, _) = ProbePass(), unfolded(first_part(model.base_model, *LAYERS))
        with torch.inference_mode(), numbered(layers), announced(probe):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
        if probe.windows_of_masks != probe.windows_of_calls:
            raise NativeUnavailableError("the window of each of its layers is unknown")
        self.calls = probe.calls


ModelFacts = HFModel | OwnAttention | HybridFacts


def facts_of(model: Any) -> ModelFacts:
    """Return the facts of a `…ForCausalLM`, whose attention is set to ours where it can be chosen."""
    if any(recurrent_mixer(layer) is not None for layer in unfolded(first_part(model.base_model, *LAYERS) or ())[0]):
        return HybridFacts(model)
    layers = first_part(model.base_model, "h")
    attention = first_part(layers[0], "self_attention") if layers is not None and len(layers) else None
    if hasattr(attention, "query_key_value") and first_part(model.base_model, "rotary_emb") is not None:
        return OwnAttention(model)
    return HFModel(model)


ATTENTION = ("self_attn", "attn", "attention", "self_attention")
QUERIES = ("q_proj", "qkv_proj", "c_attn", "q_b_proj")
QUERY_NORM, KEY_NORM = ("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")
FACTOR_TOLERANCE = 1e-2
"""Largest relative error of a factor of queries that is one of the usual ones, in half precision."""
ROTATION_TOLERANCE = 0.1
"""Largest error of rotated queries relative to their size. Another rotation of random queries differs by about 1."""


class Rotation(Enum):
    """How the queries of a layer are rotated by position.

    HALVES: number i of the rotary part of a head and number i of its second half are a pair.
    PAIRS: neighbouring numbers are a pair.
    """

    NONE = "none"
    HALVES = "halves"
    PAIRS = "pairs"


class _EnoughError(Exception):
    """Ends a pass once all queries of interest are known."""


@dataclass(slots=True)
class _Queries(ProbePass):
    """Pass that records the queries of each layer, shape (rows, heads, head_dim), up to a last layer."""

    last: int | None = None
    queries: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.queries[call.layer] = query[0].transpose(0, 1).float()
        if call.layer == self.last:
            raise _EnoughError
        return ProbePass.attend(self, call, query, key, value)


@torch.inference_mode()
def _before_and_after(
    model: ModelFacts, layers: Sequence[Any], *, last: int | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return each layer's queries before and after rotation, (rows, heads, head_dim), up to layer `last`."""
    heads = int(model.config.num_attention_heads)
    tokens = [1, 2, 1] if heads == 2 else [1, 2]  # not as many rows as heads, which tells both dimensions apart
    outputs: dict[int, Tensor] = {}
    probe = _Queries(last=last)
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            attention = attention_of(layer)
            for module in (first_part(attention, *QUERIES), first_part(attention, *QUERY_NORM)):
                # of product and norm, which runs later, the last one is kept
                if module is not None and not has_adapters(attention):
                    hook = module.register_forward_hook(
                        lambda _, inputs, out, index=index: outputs.update({index: out})
                    )
                    stack.callback(hook.remove)
        try:
            with numbered(layers), announced(probe):
                model.model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
        except _EnoughError:
            pass
    pairs = {}
    for index, after in probe.queries.items():
        if index in outputs:
            before = outputs[index][0].float()
            before = before.transpose(0, 1) if before.shape[0] != len(tokens) else before
            pairs[index] = before.reshape(len(tokens), -1)[:, : after[0].numel()].reshape(after.shape), after
    return pairs


def query_factors(model: ModelFacts, layers: Sequence[Any]) -> dict[int, float]:
    """Return by layer the factor between the product of its queries and the queries with which it attends.

    Some families scale queries before their attention. It is only of use for layers without rotary positions.
    """
    factors = {}
    for index, (before, after) in _before_and_after(model, layers).items():
        factor = float((after * before).sum() / before.square().sum().clamp_min(torch.finfo().tiny))
        usual = (1.0, float(after.shape[-1]) ** -0.5)
        factors[index] = next((value for value in usual if abs(factor - value) < FACTOR_TOLERANCE * value), factor)
    return factors


def rotations(
    model: ModelFacts, layers: Sequence[Any], ropes: Sequence[Rope], kinds: Sequence[int | None]
) -> list[Rotation]:
    """Return how each layer rotates its queries.

    Layers with the same rotary positions and the same window are alike, so the pass ends at the last layer that is the
    first one of its kind. Queries of products with another name are taken to be rotated in the usual way; whether
    they are is found by the comparison of logits.

    `kinds`: index of each layer's kind; None for none.
    """
    alike = [(kind, None if kind is None else model.calls[index].window) for index, kind in enumerate(kinds)]
    firsts = {key: alike.index(key) for key in alike if key[0] is not None}
    if not any(first_part(attention_of(layer), *QUERIES) for layer in layers):
        return [Rotation.NONE if kind is None else Rotation.HALVES for kind in kinds]
    if not firsts:
        return [Rotation.NONE] * len(layers)
    recorded = _before_and_after(model, layers, last=max(firsts.values()))
    of_kind: dict[tuple[int | None, int | None], Rotation] = {}
    for (kind, window), index in firsts.items():
        if kind is not None and index in recorded:
            before, after = recorded[index]
            size = 2 * len(ropes[kind].frequencies)
            first = before.shape[-1] - size if is_latent(attention_of(layers[index])) else 0
            of_kind[kind, window] = _rotation(before, after, ropes[kind], first=first)
    return [of_kind.get(key, Rotation.NONE if key[0] is None else Rotation.HALVES) for key in alike]


def _rotation(before: Tensor, after: Tensor, rope: Rope, *, first: int) -> Rotation:
    """Return the rotation that agrees best with queries; HALVES, the usual one, if none agrees.

    `first`: numbers of a head before those that rotate.
    """
    cosines, sines = (table[:, None, : table.shape[1] // 2] for table in rope.at(torch.arange(before.shape[0])))
    start, turned, rest = before.tensor_split([first, first + 2 * cosines.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    even, odd = turned[..., ::2], turned[..., 1::2]
    pairs = (even * cosines - odd * sines, odd * cosines + even * sines)
    rotated = (
        (Rotation.HALVES, torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)),
        (Rotation.PAIRS, torch.stack(pairs, dim=-1).flatten(-2)),
        (Rotation.PAIRS, torch.cat(pairs, dim=-1)),  # keys have this order as well
        (Rotation.NONE, turned),
    )
    errors = [(float((torch.cat((start, part, rest), dim=-1) - after).norm()), kind) for kind, part in rotated]
    error, best = min(errors, key=lambda each: each[0])
    return best if error <= ROTATION_TOLERANCE * float(after.norm()) else Rotation.HALVES


BEFORE_ATTENTION = ("input_layernorm", "ln_attn", "ln_1", "self_attn_layer_norm", "operator_norm")
BEFORE_MLP = ("ln_mlp", "post_attention_layernorm", "ln_2", "final_layer_norm", "ffn_norm", "pre_ff_layernorm")
SUBLAYER, BEFORE_SUBLAYER = "mixer", "norm"
"""Names in layers that have one sublayer."""
OUTPUT = ("o_proj", "out_proj", "c_proj", "dense")
AFTER_ATTENTION = "post_attention_layernorm"
"""Name of a norm before the perceptron, or after attention if there are other names for that or none before it."""
UP = ("fc1", "c_fc", "dense_h_to_4h")
GATE_UP = (("gate_proj", "up_proj"), ("w1", "w3"))
DOWN = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2", "output_linear")
FUSED_GATE_UP = ("gate_up_proj", "input_linear")
SHARED_EXPERT = "shared_mlp"
"""Name of a perceptron beside experts, whose results are added to theirs, or of the only one."""


def attention_of(layer: Any) -> Any:
    """Return the module of a layer that attends; None for none."""
    sublayer = first_part(layer, SUBLAYER)
    attention = sublayer if first_part(sublayer, *QUERIES) is not None else first_part(layer, *ATTENTION)
    return attention if attention is None or convolution_of(attention) is None else None


def mlp_of(layer: Any) -> Any:
    """Return the module with the perceptron: the layer itself in some families; None for none."""
    if hasattr(layer, "fc1"):
        return layer
    if (sublayer := first_part(layer, SUBLAYER)) is not None:
        return sublayer if has_experts(sublayer) or first_part(sublayer, *DOWN) is not None else None
    take = first_part if attention_of(layer) is None else part
    return take(layer, "mlp", "feed_forward", "block_sparse_moe", SHARED_EXPERT)


def first_products(mlp: Any) -> tuple[str, ...]:
    """Return the names of the products that read the input of a perceptron."""
    names = (*GATE_UP, *((name,) for name in UP), ("up_proj",))
    return next((each for each in names if all(hasattr(mlp, name) for name in each)), GATE_UP[0])


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Modules of the norms of a layer, None for none: before and after attention, before and after the perceptron."""

    attention: Any
    attention_post: Any
    mlp: Any
    mlp_post: Any

    @property
    def any(self) -> Any:
        return next(norm for norm in (self.attention, self.attention_post, self.mlp) if norm is not None)


def norms_of(layer: Any) -> LayerNorms:
    first, after = first_part(layer, *BEFORE_ATTENTION), first_part(layer, AFTER_ATTENTION)
    feedforward = first_part(layer, "post_feedforward_layernorm")
    if first is None and after is not None and feedforward is not None:
        return LayerNorms(None, after, None, feedforward)
    if hasattr(layer, SUBLAYER):
        norm = part(layer, BEFORE_SUBLAYER)
        return LayerNorms(norm, None, None, None) if mlp_of(layer) is None else LayerNorms(None, None, norm, None)
    first = part(layer, *BEFORE_ATTENTION)
    if hasattr(layer, "pre_feedforward_layernorm"):
        return LayerNorms(first, after, layer.pre_feedforward_layernorm, feedforward)
    if hasattr(layer, "post_self_attn_layernorm"):
        return LayerNorms(first, layer.post_self_attn_layernorm, after, part(layer, "post_mlp_layernorm"))
    second = first_part(layer, *BEFORE_MLP)
    if hasattr(layer, "post_operator_norm"):
        posts = (layer.post_operator_norm, part(layer, "post_ffn_norm"))
        attention_post, mlp_post = (None if isinstance(norm, nn.Identity) else norm for norm in posts)
        return LayerNorms(first, attention_post, second, mlp_post)
    return LayerNorms(first, None, first if second is None else second, None)  # parallel sublayers may share theirs


def describe_layer(layer: Any, *, names: Names) -> LayerBlueprint:
    """Return the blueprint of a layer without its mixer."""
    norms = norms_of(layer)
    return LayerBlueprint(
        attention_norm=_name_of(norms.attention, names),
        attention_post_norm=_name_of(norms.attention_post, names),
        mlp_norm=_name_of(norms.mlp, names),
        mlp_post_norm=_name_of(norms.mlp_post, names),
        query_norm=None,
        key_norm=None,
        qkv=(),
        output=None,
        window=None,
        scaling=1.0,
        rope=None,
        **_perceptron(layer, int(part(norms.any, "weight").numel()), names=names),
    )


def _perceptron(layer: Any, hidden: int, *, names: Names) -> dict[str, Any]:
    """Return the fields of a layer's blueprint that describe its perceptron."""
    mlp = mlp_of(layer)
    if mlp is None:
        return {"gate_up": (), "down": None}
    if has_experts(mlp):
        experts = experts_of(mlp, hidden, names=names, shared=first_part(layer, SHARED_EXPERT))
        return {"gate_up": (experts.gate_up,), "down": experts.down, "experts": experts}
    first, *others = linears_of(mlp, first_products(mlp), FUSED_GATE_UP, names=names)
    down = linear_of(part(mlp, *DOWN), "'down_proj'", names=names)
    return {
        "gate_up": (scaled(first, getattr(mlp, "gate_multiplier", 1.0)), *others),
        "down": scaled(down, getattr(mlp, "down_multiplier", 1.0)),
    }


def _name_of(norm: Any, names: Names) -> str | None:
    return None if norm is None else names.of(norm)


def with_attention(
    plan: LayerBlueprint,
    attention: Any,
    call: LayerCall,
    rope: int | None,
    *,
    names: Names,
    heads: int,
    factor: float,
    pairs: int = 0,
) -> LayerBlueprint:
    """Return a layer with attention, whose rotary positions have the index `rope`; None for none."""
    output = linear_of(part(attention, *OUTPUT), "'o_proj'", names=names)
    plan = replace(plan, output=output, window=call.window, scaling=call.scaling * factor, rope=rope)
    if is_latent(attention):
        if call.softcap is not None or call.sinks is not None:
            raise NativeUnavailableError("its latent attention has caps of scores, or sinks")
        return with_latent_attention(plan, attention, LatentSizes.of(attention, heads), pairs=pairs, names=names)
    qkv = _queries_keys_values(attention, names=names, pairs=pairs)
    head_dim, gate_size = output.inputs // heads, 0
    if len(qkv) == 3 and qkv[0].outputs == 2 * output.inputs:  # queries and gate of each head
        gate_size = head_dim
        both = replace(qkv[0], outputs=output.inputs)
        queries = replace(both, part=OutputPart(heads, 0, head_dim))
        qkv = (queries, *qkv[1:], replace(both, part=OutputPart(heads, head_dim, 2 * head_dim)))
    elif (gate := first_part(attention, "g_proj")) is not None:
        qkv = (*qkv, linear_of(gate, "'g_proj'", names=names))
        gate_size = qkv[-1].outputs // heads
    return replace(
        plan,
        query_norm=_name_of(first_part(attention, *QUERY_NORM), names),
        key_norm=_name_of(first_part(attention, *KEY_NORM), names),
        qkv=qkv,
        score_cap=call.softcap,
        sinks=None if call.sinks is None else names.of_parameter(call.sinks),
        gate_size=gate_size,
    )


def with_recurrence_beside(plan: LayerBlueprint, layer: Any, attention: Any, mixer: MixerBlueprint) -> LayerBlueprint:
    """Return a layer with attention as one whose mixer with a state reads the same input."""
    reads, writes, keys = (
        getattr(owner, f"{name}_multiplier", 1.0)
        for owner, name in ((layer, "attention_in"), (layer, "attn_out"), (attention, "key"))
    )
    biases = [None if output is None else output.bias for output in (plan.output, mixer.output)]
    if len(plan.qkv) != 3 or plan.output is None or biases != [None, None] or mixer.latents:
        raise NativeUnavailableError(f"{type(layer).__name__} adds the results of its mixers in an unknown way")
    query, key, value = (scaled(linear, reads) for linear in plan.qkv)
    beside = replace(mixer, output=scaled(mixer.output, getattr(layer, "ssm_out_multiplier", 1.0)))
    return replace(plan, qkv=(query, scaled(key, keys), value), output=scaled(plan.output, writes), beside=beside)


def _queries_keys_values(attention: Any, *, names: Names, pairs: int) -> tuple[LinearBlueprint, ...]:
    """Return the products before attention; heads of one product lie side by side, each with its key and value."""
    fused = first_part(attention, "query_key_value")
    if fused is None:
        linears = linears_of(attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj", "c_attn"), names=names)
        if pairs and (len(linears) != 3 or hasattr(attention, "q_norm")):
            raise NativeUnavailableError("neighbouring numbers rotate in a fused product, or behind norms of heads")
        return (*(replace(linear, pairs=pairs) for linear in linears[:2]), linears[2]) if pairs else linears
    whole = linear_of(fused, "'query_key_value'", names=names)
    head_dim = int(part(attention, "head_size", "head_dim"))
    heads = whole.inputs // head_dim
    kv_heads = (whole.outputs // head_dim - heads) // 2
    return (replace(whole, groups=0 if kv_heads == 1 else kv_heads),)


def has_gates(layers: Sequence[LayerBlueprint]) -> bool:
    """Return whether perceptrons have gates, as that of the first layer with a perceptron."""
    return any(
        sum(linear.outputs for linear in layer.gate_up) == 2 * layer.down.inputs
        for layer in layers
        if layer.down is not None
    )


LAYERS = ("layers", "h")
ROTARY = ("rotary_emb", "pos_emb")
LAST_NORM = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "embedding_norm", "norm_f")
POSITIONS = ("wpe", "embed_positions")
ACTIVATION = ("act_fn", "activation_fn", "act", "activation")


def read(model: ModelFacts) -> Blueprint:
    names = Names(model.model)
    config = model.config
    inner = model.model
    base = model.model.base_model
    base = base if first_part(base, *LAYERS) is not None else part(base, "decoder")
    modules, blocks = unfolded(part(base, *LAYERS))
    if getattr(config, "_heterogeneity_spec", None) is not None:
        raise NativeUnavailableError("its layers have sizes of their own")
    mlps = [mlp for module in modules if (mlp := mlp_of(module)) is not None]
    if not mlps:
        raise NativeUnavailableError("none of its layers has a perceptron")
    heads = int(config.num_attention_heads)
    latent = next((attention for layer in modules if is_latent(attention := attention_of(layer))), None)
    sizes = None if latent is None else LatentSizes.of(latent, heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    head_dim = head_dim if sizes is None else sizes.head_dim
    rotary = first_part(base, *ROTARY)
    table = first_part(base, *POSITIONS)
    if table is not None and not isinstance(table, nn.Embedding):
        raise NativeUnavailableError(f"its positions are a {type(table).__name__}, not a table")
    if any("dynamic" in str(rope.get("rope_type")) for rope in rope_settings(config)):
        raise NativeUnavailableError("its rotary positions change with the length of the text")
    if rotary is None and table is None and not any(map(recurrent_mixer, modules)):
        raise NativeUnavailableError(f"{type(base).__name__} has no 'rotary_emb', and no table of positions")
    first_norm = norms_of(modules[0]).any
    # norms follow their sublayers if the modules run in this order
    is_post_norm = norm_facts(first_norm).kind == LAYER_NORM and not runs_before(
        partial(_probe, model), first_norm, part(modules[0], *ATTENTION)
    )
    layers, ropes = _layers(model, modules, rotary, names=names)
    for use, (index, linear) in enumerate(blocks.items()):
        block = modules[index]
        layer = beside(layers[index], attention_of(block), mlp_of(block), linear, use=use, names=names)
        layers = (*layers[:index], layer, *layers[index + 1 :])
    norm = first_part(base, *LAST_NORM)
    facts = norm_facts(first_norm if norm is None else norm)
    require_like_norms(inner, [name for layer in layers for name in layer.norms], facts)
    final = None if norm is None else names.of(norm)
    if is_post_norm:
        layers, final = norms_after(layers, final)
    embedding = inner.get_input_embeddings()
    activation, limit, slope = _activation(mlps)
    head_norms = [name for layer in layers for name in (layer.query_norm, layer.key_norm) if name is not None]
    offset = 0 if table is None else int(getattr(table, "offset", 0))
    rows = model.max_length if table is None else int(table.weight.shape[0]) - offset
    plan = Blueprint(
        kind=model.kind,
        fingerprint=model.fingerprint,
        context=min(model.max_length, rows),
        dtype=str(model.dtype).removeprefix("torch."),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=_kv_heads(layers, heads=heads, head_dim=head_dim),
        head_dim=head_dim,
        mlp=max(map(inner_size, layers)),
        vocab=model.vocab_size,
        activation=activation,
        epsilon=facts.epsilon,
        norm_offset=facts.offset,
        embedding_scale=scale_of_embedding(embedding, config),
        residual_scale=float(first_part(config, "residual_multiplier") or getattr(modules[0], "residual_scale", 1.0)),
        logit_scale=_logit_scale(config),
        embedding=names.of(embedding),
        final_norm=final,
        head=linear_of(inner.get_output_embeddings(), "the head", names=names),
        ropes=ropes,
        layers=layers,
        query_scaling=_query_scaling(config),
        norm=facts.kind,
        has_norm_bias=facts.has_bias,
        is_post_norm=is_post_norm,
        is_gated=has_gates(layers),
        is_parallel=_is_parallel(model, modules[0]),
        has_joint_norms=any(names.parameters[name].numel() != head_dim for name in head_norms),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        gate_limit=limit,
        gate_slope=slope,
        positions=None if table is None else names.of(table),
        position_offset=offset,
        shared_dim=0 if sizes is None else sizes.shared,
        values=None if sizes is None else sizes.value,
    )
    require_sizes(plan, names)
    require_nothing_else(names, plan)
    return plan


def _query_scaling(config: Any) -> QueryScaling | None:
    """Return the scaling of queries by position, which texts that the model is checked with are too short to show."""
    for rope in rope_settings(config):
        if (slope := rope.get("llama_4_scaling_beta")) is not None:
            return QueryScaling(float(slope), int(rope["original_max_position_embeddings"]))
    return None


def _logit_scale(config: Any) -> float:
    """Return the factor of the logits, which some families give as a divisor."""
    factor = first_part(config, "logit_scale", "lm_head_multiplier")
    return 1.0 / float(getattr(config, "logits_scaling", 1.0)) if factor is None else float(factor)


def _kv_heads(layers: Sequence[LayerBlueprint], *, heads: int, head_dim: int) -> int:
    attention = next((layer for layer in layers if layer.attends), None)
    if attention is None or attention.has_latent_keys:
        return heads
    return (sum(linear.outputs for linear in attention.qkv) - heads * (head_dim + attention.gate_size)) // (
        2 * head_dim
    )


def inner_size(layer: LayerBlueprint) -> int:
    if layer.experts is not None:
        return layer.experts.widest
    return 0 if layer.down is None else layer.down.inputs


def _layers(
    model: ModelFacts, modules: Sequence[Any], rotary: Any, *, names: Names
) -> tuple[tuple[LayerBlueprint, ...], tuple[Rope, ...]]:
    """Return the blueprints of all layers, and the kinds of rotary positions that they use."""
    of_layers = _kinds(rotary, model.config, modules)
    kinds = tuple(dict.fromkeys(kind for kind in of_layers if kind is not None))
    ropes = read_ropes(rotary, kinds, context=model.max_length)
    numbers = [None if kind is None else kinds.index(kind) for kind in of_layers]
    turned = rotations(model, modules, ropes, numbers)
    numbers = [None if turn is Rotation.NONE else number for turn, number in zip(turned, numbers, strict=True)]
    attends = [attention_of(layer) is not None for layer in modules]
    is_unplaced = any(number is None and attending for number, attending in zip(numbers, attends, strict=True))
    factors = query_factors(model, modules) if is_unplaced else {}
    layers = []
    for index, (layer, number) in enumerate(zip(modules, numbers, strict=True)):
        plan, attention = describe_layer(layer, names=names), attention_of(layer)
        mixer = None if recurrent_mixer(layer) is None else describe_mixer(layer, names=names)
        if attention is None:
            if mixer is not None:
                fields: dict[str, Any] = {"recurrence": mixer.recurrence, "latents": mixer.latents}
                plan = replace(plan, qkv=mixer.inputs, output=mixer.output, **fields)
            layers.append(plan)
            continue
        is_paired = number is not None and turned[index] is Rotation.PAIRS
        plan = with_attention(
            plan,
            attention,
            model.calls[index],
            number,
            names=names,
            heads=int(model.config.num_attention_heads),
            factor=factors.get(index, 1.0) if number is None else 1.0,
            pairs=2 * len(ropes[number].frequencies) if number is not None and is_paired else 0,
        )
        layers.append(plan if mixer is None else with_recurrence_beside(plan, layer, attention, mixer))
    return tuple(layers), ropes


def _kinds(rotary: Any, config: Any, layers: Sequence[Any]) -> Sequence[str | None]:
    """Return each layer's kind of rotary positions; "" if there is only one, None for none."""
    if rotary is None:
        return [None] * len(layers)
    known = [""] * len(layers)
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        known = [str(kind) for kind in config.layer_types]
    attentions = list(map(attention_of, layers))
    uses = [attention is not None and getattr(attention, "use_rope", True) for attention in attentions]
    return [kind if used else None for kind, used in zip(known, uses, strict=True)]


def norms_after(layers: Sequence[LayerBlueprint], last: str | None) -> tuple[tuple[LayerBlueprint, ...], str | None]:
    """Return layers whose norms follow their sublayers as layers with norms before them, and the last norm."""
    if last is not None:
        raise NativeUnavailableError("it has norms after its sublayers and one after the last of these")
    before = (None, *(layer.mlp_norm for layer in layers))
    return tuple(map(LayerBlueprint.with_norms_of, layers, before)), before[-1]


def _is_parallel(model: ModelFacts, layer: Any) -> bool:
    """Return whether the perceptron of a layer does not read what its attention adds.

    Only a layer without a second norm, or with norms of mean and variance, can be such a layer.
    """
    if attention_of(layer) is None or hasattr(layer, SUBLAYER):
        return False
    if first_part(layer, *BEFORE_MLP) is not None and norm_facts(norms_of(layer).any).kind != LAYER_NORM:
        return False
    reader = part(mlp_of(layer), *UP, "gate_up_proj", "up_proj")
    return reads_before(partial(_probe, model), part(attention_of(layer), *OUTPUT), reader)


def _probe(model: ModelFacts) -> None:
    with announced(ProbePass()):
        model.model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)


def _activation(mlps: Sequence[Any]) -> tuple[int, float, float]:
    """Return the activation of all layers, and limit and slope of gates that are clamped."""
    clamps = {clamps_of(mlp) for mlp in mlps}
    if clamps == {None}:
        functions = [first_part(activation_module(mlp), *ACTIVATION) for mlp in mlps]
        unnamed = [mlp for mlp, function in zip(mlps, functions, strict=True) if function is None]
        kinds = {gated_activation_of(mlp, *first_products(mlp), down=part(mlp, *DOWN)) for mlp in unnamed}
        if named := [function for function in functions if function is not None]:
            kinds.add(activation_of(named))
        if len(kinds) > 1:
            raise NativeUnavailableError("its layers have several activations")
        return kinds.pop(), 0.0, 0.0
    (clamp,) = clamps if len(clamps) == 1 else (None,)
    if clamp is None:
        raise NativeUnavailableError("the gates of its layers are clamped in different ways")
    return CLAMPED_SILU, *clamp


def require_sizes(plan: Blueprint, names: Names) -> None:
    shared = [layer.experts.shared_down for layer in plan.layers if layer.experts is not None]
    inner = {down.inputs for down in (*(layer.down for layer in plan.layers), *shared) if down is not None}
    channels = {layer.state.channels for layer in plan.layers if layer.state is not None}
    units = [("hidden size", plan.hidden, 16), ("size of a head", plan.head_dim, 16)]
    units += [("inner size", size, 32) for size in sorted(inner)]
    for name, size, unit in (*units, *(("number of channels", size, 16) for size in sorted(channels))):
        if size % unit:
            raise NativeUnavailableError(f"its {name} of {size} is no multiple of {unit}")
    heads = (plan.heads + 2 * plan.kv_heads) * plan.head_dim
    wide = 2 if plan.is_gated else 1
    for layer in plan.layers:
        if layer.down is not None and sum(linear.outputs for linear in layer.gate_up) != wide * layer.down.inputs:
            raise NativeUnavailableError(f"a layer has a perceptron with results of the size {layer.down.inputs}")
        if not layer.attends or layer.output is None:
            continue
        if layer.has_latent_keys != (plan.shared_dim > 0):
            raise NativeUnavailableError("some of its layers have latent attention, and others have not")
        if layer.has_latent_keys:
            require_latent_sizes(plan, layer)
            continue
        sizes = sum(linear.outputs for linear in layer.qkv) - layer.gate_size * plan.heads, layer.output.inputs
        if sizes != (heads, plan.heads * plan.head_dim) or layer.gate_size not in (0, 1, plan.head_dim):
            raise NativeUnavailableError(f"a layer has projections of the sizes {sizes}")
        norms = [
            (layer.query_norm, plan.heads if plan.has_joint_norms else 1),
            (layer.key_norm, plan.kv_heads if plan.has_joint_norms else 1),
        ]
        if any(norm and names.parameters[norm].shape != (count * plan.head_dim,) for norm, count in norms):
            raise NativeUnavailableError("it normalizes queries and keys in parts of another size")
    if len(plan.ropes) > 2:
        raise NativeUnavailableError(f"it has {len(plan.ropes)} kinds of rotary positions")


def require_nothing_else(names: Names, plan: Blueprint, others: Iterable[Any] = ()) -> None:
    """Check that every parameter belongs to the blueprint, or is another one of known use."""
    known = set(map(id, others))
    strange = [name for name, value in names.parameters.items() if name not in plan.names and id(value) not in known]
    if strange:
        raise NativeUnavailableError(f"{len(strange)} of its parameters are of unknown use ({strange[0]}, …)")


logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16")  # dtypes of passes
PACKED_AS: Mapping[str, str] = MappingProxyType({"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"})
"""The dtype of passes by that of a model. Every number of float16 is one of float32."""


def plan_lowering(model: ModelFacts) -> Blueprint:
    """Return the blueprint of a model. The weights of a float16 model are packed as float32, with the same values."""
    dtype = str(model.dtype).removeprefix("torch.")
    if model.device.type != "cpu" or dtype not in PACKED_AS:
        known = ", ".join(PACKED_AS)
        raise NativeUnavailableError(f"native kernels are for {known} on CPUs, not {dtype} on {model.device}")
    if PACKED_AS[dtype] != dtype:
        logger.info("%s: its %s weights are packed as %s, with the same values", model.kind, dtype, PACKED_AS[dtype])
    return replace(read(model), dtype=PACKED_AS[dtype])


def plan_model(model: Any) -> Blueprint:
    """Return the blueprint of a transformers model, whose attention implementation is set to ours where it has one."""
    return plan_lowering(facts_of(model))
