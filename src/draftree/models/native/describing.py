"""Derivation of the `Blueprint` of a transformers model.

Supported: RMS norms, grouped-query attention with rotary positions and optional norms per head, gated multilayer
perceptrons, residual connections. Modules are found by the names that nearly all families share; the name of the family
is not used. The blueprint must account for every parameter, and the native model is checked against the original
logits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.native.blueprint import GELU_TANH, SILU, Blueprint, LayerBlueprint, LinearBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.rotary import read_ropes
from draftree.models.torch.attention import LayerCall
from draftree.models.torch.embeddings import scale_of_embedding
from draftree.models.torch.hf import HFModel

NORM_OFFSETS = (0.0, 1.0)
NORM_TOLERANCE = 2.0**-6
"""Maximum relative error of an element: twice that of two roundings to bfloat16."""


def read(model: HFModel) -> Blueprint:
    """Derive the blueprint of a model.

    Args:
        model: the wrapped model, with its weights.

    Raises:
        NativeUnavailableError: the architecture is not supported; the message has the reason.
    """
    names = _Names(model.model)
    config, base, inner = model.config, model.model.base_model, model.model
    modules = list(_part(base, "layers"))
    heads, head_dim = int(config.num_attention_heads), _head_dim(config)
    norm, rotary = _part(base, "norm"), _part(base, "rotary_emb")
    of_layers = _kinds(rotary, config, modules)
    kinds = tuple(dict.fromkeys(kind for kind in of_layers if kind is not None))
    if any("dynamic" in str(kind) for kind in _rope_types(config)):
        raise NativeUnavailableError("its rotary positions change with the length of the text")
    layers = tuple(
        _layer(layer, model.calls[index], None if kind is None else kinds.index(kind), names=names)
        for index, (layer, kind) in enumerate(zip(modules, of_layers, strict=True))
    )
    _require_like_norms(inner, [name for layer in layers for name in layer.norms], norm)
    embedding = inner.get_input_embeddings()
    if getattr(config, "final_logit_softcapping", None):
        raise NativeUnavailableError("its logits are capped")
    found = Blueprint(
        kind=model.kind,
        fingerprint=model.fingerprint,
        context=model.max_length,
        dtype=str(model.dtype).removeprefix("torch."),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        mlp=layers[0].down.inputs,
        vocab=model.vocab_size,
        activation=_activation([_part(module, "mlp") for module in modules]),
        epsilon=_epsilon(norm),
        norm_offset=_norm_offset(norm),
        embedding_scale=scale_of_embedding(embedding, config),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        embedding=names.of(embedding),
        final_norm=names.of(norm),
        head=_linear(inner.get_output_embeddings(), "the head", names=names),
        ropes=read_ropes(rotary, kinds, context=model.max_length),
        layers=layers,
    )
    _require_sizes(found, names)
    _require_nothing_else(names, found)
    return found


class _Names:
    """Names of a model's parameters. A shared parameter has its first name."""

    def __init__(self, model: Any) -> None:
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}

    def of(self, module: Any) -> str:
        """Return the name of a module's weight."""
        return self._names[id(_part(module, "weight"))]

    def of_bias(self, module: Any) -> str | None:
        """Return the name of a module's bias, if it has one."""
        return None if module.bias is None else self._names[id(module.bias)]


def _part(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise NativeUnavailableError(f"{type(module).__name__} has no '{name}'")
    return found


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _kinds(rotary: Any, config: Any, layers: Sequence[Any]) -> Sequence[str | None]:
    """Return each layer's kind of rotary positions; "" if there is only one, None for none."""
    known = [""] * len(layers)
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        known = [str(kind) for kind in config.layer_types]
    uses = [getattr(_part(layer, "self_attn"), "use_rope", True) for layer in layers]
    return [kind if used else None for kind, used in zip(known, uses, strict=True)]


def _rope_types(config: Any) -> list[Any]:
    settings = getattr(config, "rope_parameters", None) or {}
    own = [settings] if "rope_type" in settings else [rope for rope in settings.values() if isinstance(rope, dict)]
    return [rope.get("rope_type") for rope in own]


def _layer(layer: Any, call: LayerCall, rope: int | None, *, names: _Names) -> LayerBlueprint:
    attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
    if call.softcap is not None or call.sinks is not None:
        raise NativeUnavailableError("its attention has capped scores or sinks")
    sandwich = hasattr(layer, "pre_feedforward_layernorm")

    def norm(owner: Any, name: str) -> str | None:
        return None if getattr(owner, name, None) is None else names.of(getattr(owner, name))

    return LayerBlueprint(
        attention_norm=names.of(_part(layer, "input_layernorm")),
        attention_post_norm=norm(layer, "post_attention_layernorm") if sandwich else None,
        mlp_norm=names.of(_part(layer, "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")),
        mlp_post_norm=norm(layer, "post_feedforward_layernorm") if sandwich else None,
        query_norm=norm(attention, "q_norm"),
        key_norm=norm(attention, "k_norm"),
        qkv=_linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj", names=names),
        output=_linear(_part(attention, "o_proj"), "'o_proj'", names=names),
        gate_up=_linears(mlp, ("gate_proj", "up_proj"), "gate_up_proj", names=names),
        down=_linear(_part(mlp, "down_proj"), "'down_proj'", names=names),
        window=call.window,
        scaling=call.scaling,
        rope=rope,
    )


def _linear(module: Any, name: str, *, names: _Names) -> LinearBlueprint:
    if type(module) is not nn.Linear:
        raise NativeUnavailableError(f"{name} is a {type(module).__name__}, not a plain linear layer")
    return LinearBlueprint(names.of(module), names.of_bias(module), module.in_features, module.out_features)


def _linears(owner: Any, parts: Sequence[str], fused: str, *, names: _Names) -> tuple[LinearBlueprint, ...]:
    """Return the linear layers with these names, or the fused one."""
    chosen = [fused] if hasattr(owner, fused) else list(parts)
    return tuple(_linear(_part(owner, name), f"'{name}'", names=names) for name in chosen)


def _activation(mlps: Sequence[Any]) -> int:
    """Return the activation of all layers, identified by its values: implementations have many names."""
    x = torch.linspace(-4, 4, 33)
    known = {SILU: F.silu(x), GELU_TANH: F.gelu(x, approximate="tanh")}
    with torch.inference_mode():
        found = [_part(mlp, "act_fn" if hasattr(mlp, "act_fn") else "activation_fn")(x) for mlp in mlps]
    for kind, wanted in known.items():
        if all(torch.allclose(one, wanted, atol=1e-5) for one in found):
            return kind
    raise NativeUnavailableError("the activation of its layers is neither SiLU nor the GELU of the hyperbolic tangent")


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else _part(norm, "eps"))


def _norm_offset(norm: Any) -> float:
    """Return the offset, 0 or 1, with which the formula reproduces the norm.

    With a large weight the two differ little, so errors are relative to each element, and a float32 copy is used if
    possible: bfloat16 rounds 25 to within 0.1.
    """
    errors = {offset: _norm_error(norm, offset) for offset in NORM_OFFSETS}
    offset = min(errors, key=lambda one: float(errors[one].mean()))
    if not float(errors[offset].max()) < NORM_TOLERANCE:  # also refuses NaN
        raise NativeUnavailableError(f"{type(norm).__name__} is not a root-mean-square norm")
    return offset


@torch.inference_mode()
def _norm_error(norm: Any, offset: float) -> Tensor:
    """Return the relative error of each element, shape (inputs, elements), with this offset.

    The inputs have a mean, which a norm may subtract, and two scales, one so small that epsilon matters.
    """
    weight: Tensor = _part(norm, "weight").detach().float()
    epsilon = _epsilon(norm)
    sizes = torch.linspace(0.5, 1.5, weight.numel())
    sizes[::3] *= -1
    x = torch.stack([sizes, sizes * epsilon**0.5]) if epsilon > 0 else sizes[None]
    found = copy.deepcopy(norm).float()(x).float()
    wanted = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * (weight + offset)
    return (found - wanted).abs() / wanted.abs().clamp_min(torch.finfo(torch.float32).tiny)


def _require_like_norms(model: Any, names: Sequence[str], final: Any) -> None:
    """Check that all norms have the same epsilon and offset, as the C library requires."""
    wanted = _epsilon(final), _norm_offset(final)
    for name in names:
        norm = model.get_submodule(name.rpartition(".")[0])
        found = _epsilon(norm), _norm_offset(norm)
        if found != wanted:
            raise NativeUnavailableError(
                f"its norms differ: epsilon and offset are {found} in '{name}' and {wanted} in the last norm"
            )


def _require_sizes(found: Blueprint, names: _Names) -> None:
    units = {"hidden size": (found.hidden, 16), "size of a head": (found.head_dim, 16), "inner size": (found.mlp, 32)}
    for name, (size, unit) in units.items():
        if size % unit:
            raise NativeUnavailableError(f"its {name} of {size} is no multiple of {unit}")
    heads = (found.heads + 2 * found.kv_heads) * found.head_dim
    for layer in found.layers:
        sizes = (
            sum(part.outputs for part in layer.qkv),
            layer.output.inputs,
            sum(part.outputs for part in layer.gate_up),
            layer.down.inputs,
        )
        if sizes != (heads, found.heads * found.head_dim, 2 * found.mlp, found.mlp):
            raise NativeUnavailableError(f"a layer has projections of the sizes {sizes}")
        norms = [name for name in (layer.query_norm, layer.key_norm) if name is not None]
        if any(names.parameters[norm].numel() != found.head_dim for norm in norms):
            raise NativeUnavailableError("it normalizes queries and keys of all heads together")
    if len(found.ropes) > 2:
        raise NativeUnavailableError(f"it has {len(found.ropes)} kinds of rotary positions")


def _require_nothing_else(names: _Names, found: Blueprint) -> None:
    strange = [name for name in names.parameters if name not in found.names]
    if strange:
        raise NativeUnavailableError(f"{len(strange)} of its parameters are of unknown use ({strange[0]}, …)")
