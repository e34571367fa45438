"""The layers of a decoder as plain functions of its weights, without the modules' own control flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.torch.attention import LayerCall
from draftree.models.torch.packing import PackedLinear
from draftree.models.torch.seq2seq.passes import DecoderPass, KeysValues

Rows = Callable[[Tensor], Tensor]  # a function of rows, shape (rows, features)


@dataclass(slots=True, eq=False)
class Projection:
    """One or several linear layers with the same input."""

    linears: Sequence[nn.Linear]  # the layers
    run: Rows  # computes their results side by side

    @classmethod
    def of(cls, *linears: nn.Linear) -> Projection:
        return cls(linears, partial(_side_by_side, linears) if len(linears) > 1 else partial(_linear, linears[0]))

    @torch.inference_mode()
    def pack(self) -> None:
        """Compute with one matrix of prepacked weights from now on."""
        whole: Any = self.linears[0]
        if len(self.linears) > 1:
            whole = nn.Linear(whole.in_features, sum(linear.out_features for linear in self.linears), device="meta")
            whole.weight = nn.Parameter(
                torch.cat([linear.weight.detach() for linear in self.linears]), requires_grad=False
            )
            whole.bias = None
            if any(linear.bias is not None for linear in self.linears):
                biases = [
                    linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                    for linear in self.linears
                ]
                whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self.run = PackedLinear(whole).forward


def _linear(linear: nn.Linear, rows: Tensor) -> Tensor:
    return F.linear(rows, linear.weight, linear.bias)


def _side_by_side(linears: Sequence[nn.Linear], rows: Tensor) -> Tensor:
    return torch.cat([F.linear(rows, linear.weight, linear.bias) for linear in linears], dim=-1)


@dataclass(frozen=True, slots=True)
class Attention:
    norm: Rows  # normalization of its input, or of its output and the residual stream
    queries: Projection  # queries; in self-attention with keys and values
    keys_values: Projection | None  # keys and values of the source, for cross-attention
    output: Projection  # projection of the result
    scaling: float  # factor of the scores
    heads: int
    biased: nn.Module | None = None  # module with the bias by distance; None for none

    def split(self, rows: Tensor, parts: int) -> list[Tensor]:
        """Return the parts of projected rows, each of shape (1, heads, rows, head_dim)."""
        projected = rows.view(rows.shape[0], parts, self.heads, -1).permute(1, 2, 0, 3)
        return [projected[part : part + 1] for part in range(parts)]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    own: Attention
    cross: Attention
    norm: Rows
    up: Projection
    activation: Rows
    down: Projection
    gated: bool


@dataclass(frozen=True, slots=True)
class DecoderFunction:
    layers: Sequence[DecoderLayer]
    embed: Callable[[DecoderPass], Tensor]
    norms_after: bool
    final: Rows | None
    head: Projection
    scale: float = 1.0
    bias: Tensor | None = None

    def run(self, current: DecoderPass, wanted: Tensor | None) -> Tensor:
        hidden = self.embed(current)
        for index, layer in enumerate(self.layers):
            hidden = self._layer(index, layer, hidden, current)
        if wanted is not None:
            hidden = hidden[wanted]
        if self.final is not None:
            hidden = self.final(hidden)
        if self.scale != 1.0:
            hidden = hidden * self.scale
        logits = self.head.run(hidden)
        return logits if self.bias is None else logits + self.bias

    def _layer(self, index: int, layer: DecoderLayer, hidden: Tensor, current: DecoderPass) -> Tensor:
        after = self.norms_after
        attention = layer.own
        cross = layer.cross
        query, key, value = attention.split(attention.queries.run(hidden if after else attention.norm(hidden)), 3)
        bias = None if attention.biased is None else current.table_of(attention.biased)
        call = LayerCall(index, attention.scaling, None, None, None, bias)
        mixed = current.inner.attend(call, query, key, value)
        hidden = hidden + attention.output.run(mixed.reshape(hidden.shape[0], -1))
        if after:
            hidden = attention.norm(hidden)
        (query,) = cross.split(cross.queries.run(hidden if after else cross.norm(hidden)), 1)
        mixed = current.attend_source(LayerCall(index, cross.scaling, None, None, None), query)
        hidden = hidden + cross.output.run(mixed.reshape(hidden.shape[0], -1))
        if after:
            hidden = cross.norm(hidden)
        wide = layer.up.run(hidden if after else layer.norm(hidden))
        if layer.gated:
            gate, wide = wide.chunk(2, dim=-1)
            wide = layer.activation(gate) * wide
        else:
            wide = layer.activation(wide)
        hidden = hidden + layer.down.run(wide)
        return layer.norm(hidden) if after else hidden

    def encoded(self, hidden: Tensor) -> list[KeysValues]:
        """Return keys and values of each layer for the encoder's output of shape (1, length, features)."""
        keys_values = []
        for layer in self.layers:
            assert layer.cross.keys_values is not None
            keys, values = layer.cross.split(layer.cross.keys_values.run(hidden[0]), 2)
            keys_values.append((keys.contiguous(), values.contiguous()))
        return keys_values

    def pack(self) -> None:
        """Use prepacked weights from now on. For float32 on CPUs with MKL."""
        for projection in (*self._projections(), self.head):
            projection.pack()

    def packed_linears(self) -> set[nn.Linear]:
        """Return the layers whose own weights are not used after `pack`: all but the head and those of the source."""
        return {linear for projection in self._projections() for linear in projection.linears}

    def _projections(self) -> Iterator[Projection]:
        for layer in self.layers:
            yield from (layer.own.queries, layer.own.output, layer.cross.queries, layer.cross.output)
            yield from (layer.up, layer.down)


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
    decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} names no decoder")
    return decoder


def _t5(model: Any, decoder: Any) -> DecoderFunction:
    layers, first = [], decoder.block[0].layer[0].SelfAttention
    for block in decoder.block:
        attention, cross, ff = (block.layer[place] for place in range(3))
        biased = attention.SelfAttention if attention.SelfAttention.has_relative_attention_bias else first
        dense = ff.DenseReluDense
        gated = hasattr(dense, "wi_0")
        layers.append(
            DecoderLayer(
                _attention(attention.SelfAttention, attention.layer_norm, "qkv", "o", biased=biased),
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
    return module.forward
