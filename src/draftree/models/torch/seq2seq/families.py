"""Decoders of transformers as `DecoderFunction`: which modules have which weights.

| kind | families |
| --- | --- |
| `block` | T5, mT5, UMT5, LongT5 |
| `layers`, norms after the sublayers | BART, PLBart, Marian, Blenderbot Small |
| `layers`, norms before the sublayers | mBART, Pegasus, Blenderbot, M2M100, Whisper |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.torch.seq2seq.layers import Attention, DecoderFunction, DecoderLayer, Projection, Rows
from draftree.models.torch.seq2seq.passes import DecoderPass

NORMS_AFTER = ("bart", "plbart", "marian", "blenderbot-small")
NORMS_BEFORE = ("mbart", "pegasus", "blenderbot", "m2m_100", "whisper")
T5_LIKE = ("t5", "mt5", "umt5", "longt5")


def decoder_function(model: Any, decoder: Any) -> DecoderFunction | None:
    """Return the decoder of a model as a function; None for a model of another kind, or with mixed dtypes."""
    kind = model.config.model_type
    if len({parameter.dtype for parameter in decoder.parameters()}) > 1 or model.dtype == torch.float16:
        return None  # the modules of T5 convert and clamp
    if kind in T5_LIKE:
        return _t5(model, decoder)
    if kind in NORMS_AFTER or kind in NORMS_BEFORE:
        return _bart(model, decoder)
    return None


def decoder_of(model: Any) -> nn.Module:
    """Return the decoder of a model.

    Raises:
        UnsupportedModelError: it names none.
    """
    decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} names no decoder")
    return decoder


def _t5(model: Any, decoder: Any) -> DecoderFunction:
    layers, first = [], decoder.block[0].layer[0].SelfAttention
    for block in decoder.block:
        own, cross, ff = (block.layer[place] for place in range(3))
        biased = own.SelfAttention if own.SelfAttention.has_relative_attention_bias else first
        dense = ff.DenseReluDense
        gated = hasattr(dense, "wi_0")
        layers.append(
            DecoderLayer(
                _attention(own.SelfAttention, own.layer_norm, "qkv", "o", biased=biased),
                _attention(cross.EncDecAttention, cross.layer_norm, "qkv", "o", is_cross=True),
                _norm(ff.layer_norm),
                Projection.of(dense.wi_0, dense.wi_1) if gated else Projection.of(dense.wi),
                dense.act,
                Projection.of(dense.wo),
                gated,
            )
        )
    scaled = getattr(model.config, "scale_decoder_outputs", None)
    if scaled is None:
        scaled = model.config.model_type == "umt5" and model.config.tie_word_embeddings
    return DecoderFunction(
        layers,
        embed=lambda current: F.embedding(current.tokens, decoder.embed_tokens.weight),
        norms_after=False,
        final=_norm(decoder.final_layer_norm),
        head=Projection.of(model.lm_head),
        scale=float(model.config.d_model) ** -0.5 if scaled else 1.0,
    )


def _bart(model: Any, decoder: Any) -> DecoderFunction:
    kind, names = model.config.model_type, ("q_proj", "k_proj", "v_proj")
    layers = [
        DecoderLayer(
            _attention(layer.self_attn, layer.self_attn_layer_norm, names, "out_proj"),
            _attention(layer.encoder_attn, layer.encoder_attn_layer_norm, names, "out_proj", is_cross=True),
            _norm(layer.final_layer_norm),
            Projection.of(layer.fc1),
            layer.activation_fn,
            Projection.of(layer.fc2),
            False,
        )
        for layer in decoder.layers
    ]
    scale = float(getattr(decoder.embed_tokens, "embed_scale", getattr(decoder, "embed_scale", 1.0)))
    if kind == "whisper":
        scale = 1.0  # its decoder does not use the scale
    norm = _norm(decoder.layernorm_embedding) if hasattr(decoder, "layernorm_embedding") else None
    norm_first = kind == "blenderbot-small"

    def embed(current: DecoderPass) -> Tensor:
        rows = F.embedding(current.tokens, decoder.embed_tokens.weight)
        if scale != 1.0:
            rows = rows * scale
        if norm is not None and norm_first:
            rows = norm(rows)
        # during a pass the module returns the positions of its rows
        rows = rows + decoder.embed_positions()[0].to(rows.dtype)
        return rows if norm is None or norm_first else norm(rows)

    return DecoderFunction(
        layers,
        embed=embed,
        norms_after=kind in NORMS_AFTER,
        final=_norm(decoder.layer_norm) if hasattr(decoder, "layer_norm") else None,
        head=Projection.of(model.get_output_embeddings()),
        bias=getattr(model, "final_logits_bias", None),
    )


def _attention(
    module: Any,
    norm: nn.Module,
    names: Sequence[str],
    output: str,
    *,
    is_cross: bool = False,
    biased: nn.Module | None = None,
) -> Attention:
    linears = [getattr(module, name) for name in names]
    heads = module.n_heads if hasattr(module, "n_heads") else module.num_heads
    queries, rest = (linears[:1], Projection.of(*linears[1:])) if is_cross else (linears, None)
    return Attention(
        _norm(norm),
        Projection.of(*queries),
        rest,
        Projection.of(getattr(module, output)),
        float(module.scaling),
        int(heads),
        biased,
    )


def _norm(module: Any) -> Rows:
    if isinstance(module, nn.LayerNorm):
        return partial(
            F.layer_norm,
            normalized_shape=module.normalized_shape,
            weight=module.weight,
            bias=module.bias,
            eps=module.eps,
        )
    if hasattr(module, "variance_epsilon") and module.weight.dtype in (torch.float32, torch.float64):
        return partial(
            F.rms_norm,
            normalized_shape=tuple(module.weight.shape),
            weight=module.weight,
            eps=module.variance_epsilon,
        )
    run: Rows = module.forward
    return run
