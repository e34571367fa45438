"""Derivation of the `Blueprint` of the decoder of an encoder-decoder model of transformers.

Two kinds of layers are known, by the names of their modules: those of T5 (`block`, one module per sublayer) and those
of BART (`layers`, all modules in the layer). Where norms, scales and positions are applied is found by one recorded
pass. The blueprint must account for every parameter of the decoder, and the native model is checked against the
original logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftree.models.native.blueprint import Blueprint, LayerBlueprint, ScoreBias, SourceBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describe import has_gates, inner_size, norms_after, require_nothing_else, require_sizes
from draftree.models.native.modules import (
    Names,
    activation_of,
    first_part,
    linear_of,
    linears_of,
    norm_facts,
    part,
    require_like_norms,
)
from draftree.models.native.seq2seq.model import SourceEncoder
from draftree.models.torch.inspection import UNBOUNDED, fingerprint

TOLERANCE = 2e-2  # largest relative difference between a factor and one of the usual ones, in half precision


@dataclass(frozen=True, slots=True)
class RecordedDecoder:
    is_post_norm: bool  # whether norms follow their sublayers
    is_start_norm_first: bool  # whether positions are added after the norm of embeddings
    embedding_scale: float  # factor of embeddings
    head_scale: float  # factor of what the head reads


@torch.inference_mode()
def record(model: Any, decoder: Any, *, first: Any, attention: Any, start_norm: Any) -> RecordedDecoder:
    """Run a decoder over two texts of one token each, and compare what its modules read and return."""
    tokens = [token for token in range(3, 8) if token != getattr(model.config, "pad_token_id", None)][:2]
    vectors, order = _recorded(model, decoder, first, attention, start_norm, tokens[0])
    others, _ = _recorded(model, decoder, first, attention, start_norm, tokens[1])
    weight: Tensor = decoder.embed_tokens.weight
    rows = (weight[tokens[0]] - weight[tokens[1]]).float()
    # positions cancel in the difference of two tokens
    entered = "layer" if start_norm is None else "start norm"
    return RecordedDecoder(
        is_post_norm=order.index("attention") < order.index("norm"),
        is_start_norm_first=start_norm is not None and not torch.equal(vectors["layer"], vectors["after start norm"]),
        embedding_scale=_factor(vectors[entered] - others[entered], rows, "embeddings"),
        head_scale=_factor(vectors["head"], vectors["decoder"], "hidden states"),
    )


def _recorded(
    model: Any, decoder: Any, first: Any, attention: Any, start_norm: Any, token: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Return vectors by the module that reads or returns them, and the order of the modules."""
    from transformers.modeling_outputs import BaseModelOutput

    vectors: dict[str, Tensor] = {}
    order: list[str] = []

    def note(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            vectors.setdefault(name, value.flatten(0, -2)[-1].float())
        order.append(name)

    def reads(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], *, name: str) -> None:
        note(name, arguments[0] if arguments else options.get("hidden_states"))

    def returns(module: nn.Module, arguments: tuple[Any, ...], output: Any, *, name: str) -> None:
        note(name, output if isinstance(output, Tensor) else output[0])

    layer = next(iter(getattr(decoder, "layers", None) or decoder.block))
    inputs = {"layer": layer, "norm": first, "attention": attention, "head": model.get_output_embeddings()}
    outputs = {"decoder": decoder}
    if start_norm is not None:
        inputs["start norm"] = outputs["after start norm"] = start_norm
    with ExitStack() as hooks:
        for name, module in inputs.items():
            hooks.callback(module.register_forward_pre_hook(partial(reads, name=name), with_kwargs=True).remove)
        for name, module in outputs.items():
            hooks.callback(module.register_forward_hook(partial(returns, name=name)).remove)
        size = int(model.config.hidden_size)
        hidden = torch.linspace(-1, 1, size, dtype=next(model.parameters()).dtype).expand(1, 2, size)
        model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            decoder_input_ids=torch.tensor([[token]]),
            use_cache=False,
            return_dict=True,
        )
    return vectors, order


def _factor(vector: Tensor, of: Tensor, what: str) -> float:
    """Return the factor between two vectors: 1, or the root of their size or its inverse."""
    factor = float((vector * of).sum() / of.square().sum().clamp_min(torch.finfo().tiny))
    root = float(vector.numel()) ** 0.5
    for usual in (1.0, root, 1.0 / root):
        if abs(factor - usual) <= TOLERANCE * usual:
            return usual
    raise NativeUnavailableError(f"it multiplies {what} by {factor:.4g}")


def _positions(model: Any, decoder: Any) -> dict[str, Any]:
    """Return the fields of a blueprint about the table of positions."""
    table = first_part(decoder, "embed_positions")
    if table is None:
        return {"context": UNBOUNDED}
    prefix = next(name for name, module in model.named_modules() if module is table)
    if isinstance(table, nn.Embedding):
        offset = int(getattr(table, "offset", 0))
        rows = int(table.weight.shape[0])
        return {"positions": f"{prefix}.weight", "position_offset": offset, "context": rows - offset}
    if not isinstance(getattr(table, "weights", None), Tensor):
        raise NativeUnavailableError(f"its positions are a {type(table).__name__}, not a table")
    # padding tokens have the position of padding, a row of zeros
    pad, length = int(table.padding_idx), int(model.config.max_position_embeddings)
    rows = length + pad + 1
    if rows > table.weights.shape[0]:
        table.make_weights(rows, table.embedding_dim, pad)
    if table.weights[pad].any():
        raise NativeUnavailableError("the position of its padding tokens is not zero")
    name = f"{prefix}.weights"
    return {"positions": name, "position_offset": pad + 1, "context": length, "unplaced": pad}


@torch.inference_mode()
def score_bias_of(attention: Any, names: Names) -> ScoreBias | None:
    """Return the bias by distance of an attention that has one of its own; None for none."""
    table = getattr(attention, "relative_attention_bias", None)
    if table is None:
        return None
    distance = int(attention.relative_attention_max_distance)
    count = int(attention.relative_attention_num_buckets)
    settings = {"bidirectional": False, "num_buckets": count, "max_distance": distance}
    known = inspect.signature(attention._relative_position_bucket).parameters  # some families read their own settings
    options = {name: value for name, value in settings.items() if name in known}
    buckets = attention._relative_position_bucket(-torch.arange(distance + 1), **options)
    return ScoreBias(names.of(table), tuple(buckets.tolist()))


QUERIES = ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")
OUTPUT = ("out_proj", "o")


class LayerModules(NamedTuple):
    attention: Any  # attention to the text
    attention_norm: Any
    source: Any  # attention to the source
    source_norm: Any
    mlp: Any  # module with the products of the perceptron
    mlp_norm: Any


def read_decoder(model: Any) -> tuple[Blueprint, SourceEncoder]:
    """Derive the blueprint of a decoder, and return what runs once for each source."""
    if int(getattr(model.config, "num_experts", None) or 0) > 1:
        raise NativeUnavailableError("its layers have experts")
    names, decoder = Names(model), model.get_decoder()
    modules = [_modules(layer) for layer in part(decoder, "layers", "block")]
    start_norm = first_part(decoder, "layernorm_embedding")
    recorded = record(
        model, decoder, first=modules[0].attention_norm, attention=modules[0].attention, start_norm=start_norm
    )
    heads = int(part(modules[0].attention, "num_heads", "n_heads"))
    layers, biases = _layers(modules, names)
    last = first_part(decoder, "layer_norm", "final_layer_norm")
    facts = norm_facts(modules[0].attention_norm)
    extra = [names.of(norm) for norm in (start_norm, last) if norm is not None]
    require_like_norms(model, [*(name for layer in layers for name in layer.norms), *extra], facts)
    final = None if last is None else names.of(last)
    if recorded.is_post_norm:
        layers, final = norms_after(layers, final)
    linear = linear_of(model.get_output_embeddings(), "the head", names=names)
    if getattr(model, "final_logits_bias", None) is not None:
        linear = replace(linear, bias="final_logits_bias")
    plan = Blueprint(
        kind=type(model).__name__,
        fingerprint=fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        hidden=linear.inputs,
        heads=heads,
        kv_heads=heads,
        head_dim=layers[0].qkv[0].outputs // heads,
        mlp=inner_size(layers[0]),
        vocab=linear.outputs,
        activation=activation_of([part(layer.mlp, "activation_fn", "act") for layer in modules]),
        epsilon=facts.epsilon,
        norm_offset=facts.offset,
        embedding_scale=recorded.embedding_scale,
        residual_scale=1.0,
        logit_scale=recorded.head_scale,
        embedding=names.of(decoder.embed_tokens),
        final_norm=final,
        head=linear,
        ropes=(),
        layers=layers,
        norm=facts.kind,
        has_norm_bias=facts.has_bias,
        is_post_norm=recorded.is_post_norm,
        is_gated=has_gates(layers[:1]),
        start_norm=None if start_norm is None else names.of(start_norm),
        is_start_norm_first=recorded.is_start_norm_first,
        score_biases=biases,
        **_positions(model, decoder),
    )
    require_sizes(plan, names)
    encoder = SourceEncoder(
        model.get_encoder(),
        [(_linear(layer.source, *QUERIES[1]), _linear(layer.source, *QUERIES[2])) for layer in modules],
        heads,
        model.device,
        next(model.parameters()).dtype,
    )
    # without tied embeddings the shared embedding may be in no use
    shared = (model.get_input_embeddings(), first_part(model.base_model, "shared"))
    require_nothing_else(
        names, plan, [*encoder.parameters, *(module.weight for module in shared if module is not None)]
    )
    return plan, encoder


def _modules(layer: Any) -> LayerModules:
    if hasattr(layer, "layer"):
        sublayers = zip(layer.layer, ("SelfAttention", "EncDecAttention", "DenseReluDense"), strict=False)
        return LayerModules(
            *(part(sublayer, name) for sublayer, module in sublayers for name in (module, "layer_norm"))
        )
    return LayerModules(
        part(layer, "self_attn"),
        part(layer, "self_attn_layer_norm"),
        part(layer, "encoder_attn"),
        part(layer, "encoder_attn_layer_norm"),
        layer,
        part(layer, "final_layer_norm"),
    )


def _linear(owner: Any, *names: str) -> nn.Linear:
    module = part(owner, *names)
    if type(module) is not nn.Linear:
        raise NativeUnavailableError(f"'{names[0]}' is a {type(module).__name__}, not a plain linear layer")
    return module


def _layers(modules: Sequence[LayerModules], names: Names) -> tuple[tuple[LayerBlueprint, ...], tuple[ScoreBias, ...]]:
    """Return the layers, with norms as if they were before their sublayers, and the score biases."""
    biases: list[ScoreBias] = []
    layers = []
    for layer in modules:
        bias = score_bias_of(layer.attention, names)
        if bias is not None and bias not in biases:
            biases.append(bias)
        has_gate = hasattr(layer.mlp, "wi_0")
        up = ("wi_0", "wi_1") if has_gate else ("fc1",) if hasattr(layer.mlp, "fc1") else ("wi",)
        layers.append(
            LayerBlueprint(
                attention_norm=names.of(layer.attention_norm),
                attention_post_norm=None,
                mlp_norm=names.of(layer.mlp_norm),
                mlp_post_norm=None,
                query_norm=None,
                key_norm=None,
                qkv=tuple(linear_of(part(layer.attention, *each), f"'{each[0]}'", names=names) for each in QUERIES),
                output=linear_of(part(layer.attention, *OUTPUT), "'out_proj'", names=names),
                gate_up=linears_of(layer.mlp, up, (), names=names),
                down=linear_of(part(layer.mlp, "fc2", "wo"), "'fc2'", names=names),
                window=None,
                scaling=float(part(layer.attention, "scaling")),
                rope=None,
                source=SourceBlueprint(
                    names.of(layer.source_norm),
                    linear_of(_linear(layer.source, *QUERIES[0]), "'q_proj'", names=names),
                    linear_of(part(layer.source, *OUTPUT), "'out_proj'", names=names),
                    float(part(layer.source, "scaling")),
                ),
                # a layer without a bias of its own uses that of an earlier one
                score_bias=biases.index(bias) if bias is not None else len(biases) - 1 if biases else None,
            )
        )
    return tuple(layers), tuple(biases)
