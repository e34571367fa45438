"""Decoder layers in the configurations of transformers: their values are read and written here for all layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftree.core.errors import ModelLoadError
from draftree.heads.config import HeadConfig
from draftree.heads.layouts.values import Values

LLAMA, QWEN3 = "llama", "qwen3"
SLIDING, FULL = "sliding_attention", "full_attention"


def layer_values(layer: Values) -> dict[str, Any]:
    """Return the values of `HeadConfig` that describe decoder layers and the target's vocabulary.

    Args:
        layer: flat configuration of transformers.

    Raises:
        ModelLoadError: values are missing or wrong.
    """
    layer.require("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    hidden, heads = layer.whole("hidden_size"), layer.whole("num_attention_heads")
    if heads < 1:
        raise ModelLoadError(f"{layer.place} has num_attention_heads={heads}: it must be positive")
    return {
        "hidden": hidden,
        "num_layers": layer.whole("num_hidden_layers", 1),
        "num_heads": heads,
        "num_kv_heads": layer.whole("num_key_value_heads", heads),
        "head_dim": layer.whole("head_dim", hidden // heads),
        "intermediate": layer.whole("intermediate_size"),
        "epsilon": layer.number("rms_norm_eps", 1e-6),
        "rope": rope_of(layer),
        "max_length": layer.whole("max_position_embeddings", 2048),
        "activation": layer.text("hidden_act", "silu"),
        "attention_bias": layer.flag("attention_bias"),
        "mlp_bias": layer.flag("mlp_bias"),
        "vocab_size": layer.whole("vocab_size"),
    }


def rope_of(layer: Values) -> dict[str, Any]:
    """Return rotary positions in the form of `HeadConfig.rope`, as transformers 5 or earlier versions write them.

    Raises:
        ModelLoadError: a value is wrong.
    """
    name = "rope_scaling" if layer.get("rope_parameters") is None else "rope_parameters"
    rope = dict(layer.part(name, optional=True).content)
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    rope["rope_theta"] = Values(rope, name).number("rope_theta", layer.number("rope_theta", 10000.0))
    return rope


def windows_of(layer: Values) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none; empty if no layer has one.

    Raises:
        ModelLoadError: a value is wrong.
    """
    width = layer.whole("sliding_window", 0)
    windows = tuple(width if kind == SLIDING else 0 for kind in layer.texts("layer_types"))
    return windows if any(windows) else ()


def layers_json(config: HeadConfig) -> dict[str, Any]:
    """Return the configuration of the layers as transformers writes it, for its versions 4 and 5."""
    rope = dict(config.rope)
    windows: dict[str, Any] = {}
    if any(config.windows):
        windows = {
            "use_sliding_window": True,
            "sliding_window": max(config.windows),
            "layer_types": [SLIDING if width else FULL for width in config.windows],
        }
    return {
        "model_type": QWEN3 if config.qk_norm else LLAMA,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.epsilon,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": rope if _is_scaled(rope) else None,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_length,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        **windows,
    }


def _is_scaled(rope: Mapping[str, Any]) -> bool:
    return rope.get("rope_type", "default") != "default"
