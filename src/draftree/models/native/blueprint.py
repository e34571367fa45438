"""Reads how a decoder of transformers is built, if it is built as most are.

That is: RMS norms, grouped-query attention with rotary positions (and perhaps a norm of every head), a gated
multilayer perceptron, each added to a residual stream. The parts are found by the names that nearly all families
share; a family is never asked for its name. What is read must account for every parameter of the model, and what is
built from it is checked against the model's own logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.attention import LayerCall
from draftree.models.native.build import NativeUnavailableError

SILU, GELU_TANH = 0, 1


@dataclass(frozen=True, slots=True)
class LayerBlueprint:
    """One layer. Norms are None where there is none; projections that read the same rows stand together."""

    attention_norm: Any
    attention_post_norm: Any | None
    mlp_norm: Any
    mlp_post_norm: Any | None
    query_norm: Any | None
    key_norm: Any | None
    qkv: Sequence[nn.Linear]
    output: nn.Linear
    gate_up: Sequence[nn.Linear]
    down: nn.Linear
    window: int | None
    scaling: float
    rope: str | None
    """Which kind of rotary positions; None for none."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A decoder.

    Attributes:
        ropes: kinds of rotary positions, in the order of their tables; "" where there is only one.
        norm_offset: what is added to the norms' weights.
        residual_scale: factor of what is added to the residual stream.
        logit_scale: factor of the logits.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    activation: int
    epsilon: float
    norm_offset: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    embedding: Any
    final_norm: Any
    head: nn.Linear
    rotary: Any
    ropes: tuple[str, ...]
    layers: tuple[LayerBlueprint, ...]

    @property
    def is_tied(self) -> bool:
        """Whether the head's weights are the embedding's."""
        return self.head.weight is self.embedding.weight


def read(model: Any, calls: Mapping[int, LayerCall]) -> Blueprint:
    """Read a model.

    Args:
        model: a `…ForCausalLM` with its weights.
        calls: what each layer asks of its attention.

    Raises:
        NativeUnavailableError: it is built otherwise; the message says where.
    """
    config, base = model.config.get_text_config(), model.base_model
    first = _part(base, "layers")[0]
    heads, head_dim = int(config.num_attention_heads), _head_dim(config)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    norm = _part(base, "norm")
    rotary = _part(base, "rotary_emb")
    kinds = _kinds(rotary, config)
    layers = tuple(_layer(layer, calls[index], kinds[index]) for index, layer in enumerate(_part(base, "layers")))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(config, "final_logit_softcapping", None):
        raise NativeUnavailableError("its logits are capped")
    ropes = tuple(dict.fromkeys(layer.rope for layer in layers if layer.rope is not None))
    found = Blueprint(
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=layers[0].down.in_features,
        vocab=int(config.vocab_size),
        activation=_activation(_part(first, "mlp")),
        epsilon=_epsilon(norm),
        norm_offset=_norm_offset(norm),
        embedding_scale=_embedding_scale(embedding, config),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        embedding=embedding,
        final_norm=norm,
        head=head,
        rotary=rotary,
        ropes=ropes,
        layers=layers,
    )
    _require_sizes(found)
    _require_nothing_else(model, found)
    return found


def _part(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise NativeUnavailableError(f"{type(module).__name__} has no '{name}'")
    return found


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _kinds(rotary: Any, config: Any) -> Sequence[str]:
    """Each layer's kind of rotary positions."""
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        return [str(kind) for kind in config.layer_types]
    return [""] * int(config.num_hidden_layers)


def _layer(layer: Any, call: LayerCall, kind: str) -> LayerBlueprint:
    attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
    if call.softcap is not None or call.sinks is not None:
        raise NativeUnavailableError("its attention has capped scores or sinks")
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    return LayerBlueprint(
        attention_norm=_part(layer, "input_layernorm"),
        attention_post_norm=_part(layer, "post_attention_layernorm") if sandwich else None,
        mlp_norm=_part(layer, "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        mlp_post_norm=_part(layer, "post_feedforward_layernorm") if sandwich else None,
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        qkv=_linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        output=_linear(attention, "o_proj"),
        gate_up=_linears(mlp, ("gate_proj", "up_proj"), "gate_up_proj"),
        down=_linear(mlp, "down_proj"),
        window=call.window,
        scaling=call.scaling,
        rope=kind if getattr(attention, "use_rope", True) else None,
    )


def _linear(module: Any, name: str) -> nn.Linear:
    found = _part(module, name)
    if type(found) is not nn.Linear:
        raise NativeUnavailableError(f"'{name}' is a {type(found).__name__}, not a plain linear layer")
    return found


def _linears(module: Any, names: Sequence[str], fused: str) -> list[nn.Linear]:
    """The layers of these names, or the one that holds them all."""
    return [_linear(module, fused)] if hasattr(module, fused) else [_linear(module, name) for name in names]


def _activation(mlp: Any) -> int:
    # told apart by what it does: implementations of one function have many names
    x = torch.linspace(-4, 4, 33)
    with torch.inference_mode():
        found = _part(mlp, "act_fn" if hasattr(mlp, "act_fn") else "activation_fn")(x)
    if torch.allclose(found, F.silu(x), atol=1e-5):
        return SILU
    if torch.allclose(found, F.gelu(x, approximate="tanh"), atol=1e-5):
        return GELU_TANH
    raise NativeUnavailableError("its activation is neither SiLU nor the GELU of the hyperbolic tangent")


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else _part(norm, "eps"))


def _norm_offset(norm: Any) -> float:
    """0 or 1, whichever makes the formula give what the norm gives."""
    weight: Tensor = _part(norm, "weight").detach()
    x = torch.linspace(-1, 1, weight.numel(), dtype=torch.float32)
    with torch.inference_mode():
        found = norm(x.to(weight.dtype)).float()
    normed = x * torch.rsqrt(x.pow(2).mean() + _epsilon(norm))
    for offset in (0.0, 1.0):
        wanted = normed * (weight.float() + offset)
        if torch.allclose(found, wanted, rtol=3e-2, atol=3e-2 * float(wanted.abs().max())):
            return offset
    raise NativeUnavailableError(f"{type(norm).__name__} is no root-mean-square norm")


def _embedding_scale(embedding: Any, config: Any) -> float:
    scale = getattr(embedding, "embed_scale", None)
    own = 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))
    return own * float(getattr(config, "embedding_multiplier", 1.0))


def _require_sizes(found: Blueprint) -> None:
    units = {"hidden size": (found.hidden, 16), "size of a head": (found.head_dim, 16), "inner size": (found.mlp, 32)}
    for name, (size, unit) in units.items():
        if size % unit:
            raise NativeUnavailableError(f"its {name} of {size} is no multiple of {unit}")
    heads = (found.heads + 2 * found.kv_heads) * found.head_dim
    for layer in found.layers:
        sizes = (
            sum(part.out_features for part in layer.qkv),
            layer.output.in_features,
            sum(part.out_features for part in layer.gate_up),
            layer.down.in_features,
        )
        if sizes != (heads, found.heads * found.head_dim, 2 * found.mlp, found.mlp):
            raise NativeUnavailableError(f"a layer has projections of the sizes {sizes}")
        norms = (layer.query_norm, layer.key_norm)
        if any(norm is not None and norm.weight.numel() != found.head_dim for norm in norms):
            raise NativeUnavailableError("it norms queries and keys of all heads together")
    if len(found.ropes) > 2:
        raise NativeUnavailableError(f"it has {len(found.ropes)} kinds of rotary positions")


def _require_nothing_else(model: Any, found: Blueprint) -> None:
    known: set[int] = set()
    parts: list[nn.Module | None] = [found.embedding, found.final_norm, found.head]
    for layer in found.layers:
        parts += [layer.attention_norm, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm]
        parts += [layer.query_norm, layer.key_norm, *layer.qkv, layer.output, *layer.gate_up, layer.down]
    for part in parts:
        known.update(id(parameter) for parameter in (part.parameters() if part is not None else ()))
    strange = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if strange:
        raise NativeUnavailableError(f"{len(strange)} of its parameters are of unknown use ({strange[0]}, …)")
