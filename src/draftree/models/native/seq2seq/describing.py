"""Derivation of the `Blueprint` of the decoder of an encoder-decoder model of transformers.

Two kinds of layers are known, by the names of their modules: those of T5 (`block`, one module per sublayer) and those
of BART (`layers`, all modules in the layer). Where norms, scales and positions are applied is found by one recorded
pass. The blueprint must account for every parameter of the decoder, and the native model is checked against the
original logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from draftree.models.native.blueprint import Blueprint, LayerBlueprint, ScoreBias, SourceBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describing import norms_after, require_sizes
from draftree.models.native.layer_modules import is_gated
from draftree.models.native.modules import Names, activation_of, first_part, linear_of, linears_of, part
from draftree.models.native.norms import norm_facts, require_like_norms
from draftree.models.native.seq2seq.encoder import SourceEncoder
from draftree.models.native.seq2seq.positions import PositionTable, position_table, score_bias_of
from draftree.models.native.seq2seq.recording import record
from draftree.models.torch.context import UNBOUNDED
from draftree.models.torch.identity import fingerprint

QUERIES = ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")
OUTPUT = ("out_proj", "o")


@dataclass(frozen=True, slots=True)
class LayerModules:
    """Modules of one layer.

    Attributes:
        own: attention to the text.
        own_norm: its norm.
        source: attention to the source.
        source_norm: its norm.
        mlp: module with the products of the perceptron.
        mlp_norm: its norm.
    """

    own: Any
    own_norm: Any
    source: Any
    source_norm: Any
    mlp: Any
    mlp_norm: Any


def read_decoder(model: Any) -> tuple[Blueprint, SourceEncoder]:
    """Derive the blueprint of a decoder, and return what runs once for each source.

    Args:
        model: a `…ForConditionalGeneration` in evaluation mode, on a CPU.

    Raises:
        NativeUnavailableError: the architecture is not supported; the message has the reason.
    """
    if int(getattr(model.config, "num_experts", None) or 0) > 1:
        raise NativeUnavailableError("its layers have experts")
    names, decoder = Names(model), model.get_decoder()
    modules = [_modules(layer) for layer in part(decoder, "layers", "block")]
    start_norm = first_part(decoder, "layernorm_embedding")
    recorded = record(model, decoder, first=modules[0].own_norm, attention=modules[0].own, start_norm=start_norm)
    heads = int(part(modules[0].own, "num_heads", "n_heads"))
    table = position_table(model, decoder)
    layers, biases = _layers(modules, names)
    last = first_part(decoder, "layer_norm", "final_layer_norm")
    facts = norm_facts(modules[0].own_norm)
    found_norms = [name for layer in layers for name in layer.norms]
    extra = [names.of(norm) for norm in (start_norm, last) if norm is not None]
    require_like_norms(model, [*found_norms, *extra], facts)
    final = None if last is None else names.of(last)
    if recorded.is_post_norm:
        if final is not None:
            raise NativeUnavailableError("it has norms after its sublayers and one after the last of these")
        layers, final = norms_after(layers, None)
    head = model.get_output_embeddings()
    linear = linear_of(head, "the head", names=names)
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        linear = type(linear)(linear.weight, "final_logits_bias", linear.inputs, linear.outputs)
    found = Blueprint(
        kind=type(model).__name__,
        fingerprint=fingerprint(model),
        context=UNBOUNDED if table is None else table.length,
        dtype=str(model.dtype).removeprefix("torch."),
        hidden=linear.inputs,
        heads=heads,
        kv_heads=heads,
        head_dim=layers[0].qkv[0].outputs // heads,
        mlp=layers[0].down.inputs,
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
        is_gated=is_gated(layers[0]),
        start_norm=None if start_norm is None else names.of(start_norm),
        is_start_norm_first=recorded.is_start_norm_first,
        score_biases=biases,
        **_position_fields(table),
    )
    require_sizes(found, names)
    encoder = SourceEncoder(
        model.get_encoder(),
        [(_linear(layer.source, *QUERIES[1]), _linear(layer.source, *QUERIES[2])) for layer in modules],
        heads,
        model.device,
        next(model.parameters()).dtype,
    )
    _require_nothing_else(names, found, encoder, (model.get_input_embeddings(), first_part(model.base_model, "shared")))
    return found, encoder


def _position_fields(table: PositionTable | None) -> dict[str, Any]:
    if table is None:
        return {}
    return {"positions": table.name, "position_offset": table.offset, "unplaced": table.unplaced}


def _modules(layer: Any) -> LayerModules:
    if hasattr(layer, "layer"):
        own, source, mlp = (layer.layer[place] for place in range(3))
        return LayerModules(
            part(own, "SelfAttention"), part(own, "layer_norm"),
            part(source, "EncDecAttention"), part(source, "layer_norm"),
            part(mlp, "DenseReluDense"), part(mlp, "layer_norm"),
        )  # fmt: skip
    return LayerModules(
        part(layer, "self_attn"), part(layer, "self_attn_layer_norm"),
        part(layer, "encoder_attn"), part(layer, "encoder_attn_layer_norm"),
        layer, part(layer, "final_layer_norm"),
    )  # fmt: skip


def _linear(owner: Any, *names: str) -> nn.Linear:
    found = part(owner, *names)
    if type(found) is not nn.Linear:
        raise NativeUnavailableError(f"'{names[0]}' is a {type(found).__name__}, not a plain linear layer")
    return found


def _layers(modules: Sequence[LayerModules], names: Names) -> tuple[tuple[LayerBlueprint, ...], tuple[ScoreBias, ...]]:
    """Return the layers, with norms as if they were before their sublayers, and the score biases."""
    biases: list[ScoreBias] = []
    layers = []
    for layer in modules:
        bias = score_bias_of(layer.own, names)
        if bias is not None and bias not in biases:
            biases.append(bias)
        has_gate = hasattr(layer.mlp, "wi_0")
        up = ("wi_0", "wi_1") if has_gate else ("fc1",) if hasattr(layer.mlp, "fc1") else ("wi",)
        layers.append(
            LayerBlueprint(
                attention_norm=names.of(layer.own_norm),
                attention_post_norm=None,
                mlp_norm=names.of(layer.mlp_norm),
                mlp_post_norm=None,
                query_norm=None,
                key_norm=None,
                qkv=tuple(linear_of(part(layer.own, *each), f"'{each[0]}'", names=names) for each in QUERIES),
                output=linear_of(part(layer.own, *OUTPUT), "'out_proj'", names=names),
                gate_up=linears_of(layer.mlp, up, (), names=names),
                down=linear_of(part(layer.mlp, "fc2", "wo"), "'fc2'", names=names),
                window=None,
                scaling=float(part(layer.own, "scaling")),
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


def _require_nothing_else(names: Names, found: Blueprint, encoder: SourceEncoder, shared: Sequence[Any]) -> None:
    """Check that every parameter belongs to the decoder of the blueprint, or to what runs once for each source."""
    known = {id(parameter) for parameter in encoder.parameters}
    # without tied embeddings the shared one may be in no use
    known |= {id(one.weight) for one in shared if one is not None}
    strange = [
        name for name, parameter in names.parameters.items() if name not in found.names and id(parameter) not in known
    ]
    if strange:
        raise NativeUnavailableError(f"{len(strange)} of its parameters are of unknown use ({strange[0]}, …)")
