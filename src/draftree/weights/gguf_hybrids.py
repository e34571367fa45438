"""GGUF architectures with recurrent layers: short convolutions, gated delta nets and Mamba2.

llama.cpp's converter changes some parameters, which are changed back here: the decay `A_log` is stored as -exp(A_log),
a filter of one channel without that dimension, a zero-centred normalization plus one, and the value heads of delta
nets with fewer key heads are tiled over them, not grouped by them. Falcon-H1's multipliers are folded into its weights,
so that its configuration has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from draftree.core.errors import UnsupportedModelError
from draftree.weights.gguf_families import (
    Architecture,
    Array,
    Settings,
    Shape,
    decoder_settings,
    expert_sizes,
    num_layers_of,
    pairs_to_halves,
    shortest_float,
)
from draftree.weights.gguf_file import GgufFile

CONVOLUTION, ATTENTION, RECURRENT = "conv", "full_attention", "linear_attention"


def stored_layout(name: str, shape: Shape) -> Shape:
    """Return the shape that a parameter has in transformers, from that of its tensor."""
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        return (shape[0], 1, shape[1])
    if name.endswith((".A_log", ".D", ".norm.weight")):
        return (math.prod(shape),)
    return shape


def _restore(name: str, values: Array, settings: Settings) -> Array:
    if name.endswith(".A_log"):
        values = np.log(-values.astype(np.float64)).astype(np.float32)
    return values.reshape(stored_layout(name, values.shape))


def _restore_paired(name: str, values: Array, settings: Settings) -> Array:
    if ".q_proj." in name:
        return pairs_to_halves(values, settings["num_attention_heads"])
    if ".k_proj." in name:
        return pairs_to_halves(values, settings["num_key_value_heads"])
    return _restore(name, values, settings)


def _restore_delta_net(name: str, values: Array, settings: Settings) -> Array:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values - np.float32(1)
    return _restore(name, values, settings)


def _restore_qwen3_next(name: str, values: Array, settings: Settings) -> Array:
    if not name.endswith(".in_proj_qkvz.weight"):
        return _restore_delta_net(name, values, settings)
    keys, inner = (settings[f"linear_num_{kind}_heads"] * settings[f"linear_{kind}_head_dim"] for kind in KINDS)
    groups = settings["linear_num_key_heads"]
    parts = np.split(values, [keys, 2 * keys, 2 * keys + inner])
    # a key head, its query, its values and their gates are adjacent
    return np.concatenate([part.reshape(groups, -1, values.shape[1]) for part in parts], axis=1).reshape(values.shape)


KINDS = ("key", "value")
TILED = (".in_proj_z.weight", ".in_proj_b.weight", ".in_proj_a.weight", ".A_log", ".dt_bias")


def _group_heads(name: str, values: Array, settings: Settings) -> Array:
    """Group the value heads of a delta net by their key heads."""
    groups = settings["linear_num_key_heads"]
    if name.endswith(TILED):
        return _grouped(values, groups, settings)
    if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
        first = 2 * groups * settings["linear_key_head_dim"]
        return np.concatenate([values[:first], _grouped(values[first:], groups, settings)])
    if name.endswith(".linear_attn.out_proj.weight"):
        return np.ascontiguousarray(_grouped(values.T, groups, settings).T)
    return values


def _grouped(values: Array, groups: int, settings: Settings) -> Array:
    heads = settings["linear_num_value_heads"]
    if heads == groups:
        return values
    tiled = values.reshape(heads // groups, groups, -1, *values.shape[1:])
    return np.ascontiguousarray(tiled.swapaxes(0, 1)).reshape(values.shape)


def _per_layer(file: GgufFile, key: str) -> list[int]:
    """Return a setting that a file has for each layer, or once for all."""
    count, value = num_layers_of(file), file.setting(key)
    return value[:count] if isinstance(value, list) else [value] * count


def _has(file: GgufFile, part: str) -> bool:
    return any(name.endswith(f".{part}") for name in file.tensors)


def _lfm2_settings(file: GgufFile) -> Settings:
    settings = decoder_settings(file)
    heads = _per_layer(file, "attention.head_count_kv")
    if file.setting("attention.sliding_window", 0):
        raise UnsupportedModelError(
            f"'{file.path}' attends in windows between convolutions: use the model's own folder"
        )
    return settings | {
        "norm_eps": settings.pop("rms_norm_eps"),
        "num_key_value_heads": max(heads),
        "layer_types": [ATTENTION if count else CONVOLUTION for count in heads],
        "conv_L_cache": file.setting("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
    }


def _lfm2_moe_settings(file: GgufFile) -> Settings:
    settings = _lfm2_settings(file) | expert_sizes(file)
    del settings["block_auto_adjust_ff_dim"]
    return settings | {
        "num_dense_layers": file.setting("leading_dense_block_count", 0),
        "use_expert_bias": _has(file, "exp_probs_b.bias"),
    }


def _delta_net_settings(file: GgufFile) -> Settings:
    settings = decoder_settings(file)
    num_layers, num_heads = settings["num_hidden_layers"], file.setting("ssm.time_step_rank")
    interval = file.setting("full_attention_interval", 4)
    by_interval = [bool(layer % interval) for layer in range(1, num_layers + 1)]
    is_recurrent = file.setting("attention.recurrent_layers", by_interval)[:num_layers]
    rope = settings["rope_parameters"] | {
        "partial_rotary_factor": file.setting("rope.dimension_count") / settings["head_dim"]
    }
    return settings | {
        "rope_parameters": rope,
        "layer_types": [RECURRENT if recurrent else ATTENTION for recurrent in is_recurrent],
        "linear_conv_kernel_dim": file.setting("ssm.conv_kernel"),
        "linear_num_key_heads": file.setting("ssm.group_count"),
        "linear_key_head_dim": file.setting("ssm.state_size"),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": file.setting("ssm.inner_size") // num_heads,
    }


def _qwen3_next_settings(file: GgufFile) -> Settings:
    return _delta_net_settings(file) | _qwen_experts(file) | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen3_5_settings(file: GgufFile) -> Settings:
    settings = _delta_net_settings(file)
    # for text all positions of a token are equal, so that the sections only have to be there
    sections = {"mrope_section": file.setting("rope.dimension_sections")[:3], "mrope_interleaved": True}
    return settings | {"rope_parameters": settings["rope_parameters"] | sections}


def _qwen3_5_moe_settings(file: GgufFile) -> Settings:
    return _qwen3_5_settings(file) | _qwen_experts(file)


def _qwen_experts(file: GgufFile) -> Settings:
    return expert_sizes(file) | {
        "shared_expert_intermediate_size": file.setting("expert_shared_feed_forward_length"),
    }


def _mamba_sizes(file: GgufFile) -> Settings:
    heads, inner = file.setting("ssm.time_step_rank"), file.setting("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": file.setting("ssm.state_size"),
        "mamba_n_groups": file.setting("ssm.group_count"),
        "mamba_d_conv": file.setting("ssm.conv_kernel"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def _granite_settings(file: GgufFile) -> Settings:
    settings = decoder_settings(file)
    heads = _per_layer(file, "attention.head_count_kv")
    scales = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    settings.pop("head_dim")  # that of Granite follows from the other sizes
    return (
        settings
        | _mamba_sizes(file)
        | {name: shortest_float(file.setting(key)) for name, key in scales.items()}
        | {
            "num_key_value_heads": max(heads),
            "layer_types": [ATTENTION if count else RECURRENT for count in heads],
            "mamba_expand": file.setting("ssm.inner_size") // settings["hidden_size"],
            "shared_intermediate_size": file.setting(
                "expert_shared_feed_forward_length", file.setting("feed_forward_length")
            ),
            "num_local_experts": file.setting("expert_count", 0),
            "num_experts_per_tok": file.setting("expert_used_count", 0),
            "position_embedding_type": "rope" if file.setting("rope.scaling.finetuned", True) else "nope",
            "attention_bias": _has(file, "attn_q.bias"),
        }
    )


def _falcon_h1_settings(file: GgufFile) -> Settings:
    inner = file.setting("ssm.inner_size")
    return (
        decoder_settings(file)
        | _mamba_sizes(file)
        | {
            "mamba_d_ssm": inner,
            "mamba_rms_norm": _has(file, "ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "attention_bias": _has(file, "attn_q.bias"),
            "mlp_bias": _has(file, "ffn_up.bias"),
        }
    )


def _nemotron_h_settings(file: GgufFile) -> Settings:
    settings = decoder_settings(file)
    del settings["rope_parameters"]  # its attention knows no positions
    num_layers = settings.pop("num_hidden_layers")  # follows from the types
    heads, widths = _per_layer(file, "attention.head_count_kv"), _per_layer(file, "feed_forward_length")
    num_heads = file.setting("ssm.time_step_rank")
    has_experts = file.metadata["general.architecture"] == "nemotron_h_moe"
    perceptron = "moe" if has_experts else "mlp"
    kinds = [ATTENTION if heads[layer] else perceptron if widths[layer] else RECURRENT for layer in range(num_layers)]
    settings |= {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "layer_norm_epsilon": settings.pop("rms_norm_eps"),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": file.setting("ssm.inner_size") // num_heads,
        "ssm_state_size": file.setting("ssm.state_size"),
        "n_groups": file.setting("ssm.group_count"),
        "conv_kernel": file.setting("ssm.conv_kernel"),
        "expand": file.setting("ssm.inner_size") // settings["hidden_size"],
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "attention_bias": _has(file, "attn_q.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
    }
    if not has_experts:
        return settings
    experts = expert_sizes(file)
    return settings | {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": file.setting("expert_shared_feed_forward_length"),
        "n_shared_experts": file.setting("expert_shared_count"),
        "norm_topk_prob": file.setting("expert_weights_norm"),
        "routed_scaling_factor": shortest_float(file.setting("expert_weights_scale")),
        "n_group": file.setting("expert_group_count", 1),
        "topk_group": file.setting("expert_group_used_count", 1),
        "moe_latent_size": file.setting("moe_latent_size", 0) or None,
    }


def _hybrid(
    model_type: str,
    model_class: str,
    settings: Callable[[GgufFile], Settings],
    restore: Callable[[str, Array, Settings], Array] = _restore,
    group: Callable[[str, Array, Settings], Array] | None = None,
) -> Architecture:
    return Architecture(model_type, model_class, settings, restore, stored_layout, group)


NEMOTRON_H = _hybrid("nemotron_h", "NemotronHForCausalLM", _nemotron_h_settings, _restore_paired)
HYBRIDS: dict[str, Architecture] = {
    "lfm2": _hybrid("lfm2", "Lfm2ForCausalLM", _lfm2_settings),
    "lfm2moe": _hybrid("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2_moe_settings),
    "qwen3next": _hybrid("qwen3_next", "Qwen3NextForCausalLM", _qwen3_next_settings, _restore_qwen3_next),
    "qwen35": _hybrid("qwen3_5_text", "Qwen3_5ForCausalLM", _qwen3_5_settings, _restore_delta_net, _group_heads),
    "qwen35moe": _hybrid(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen3_5_moe_settings, _restore_delta_net, _group_heads
    ),
    "granitehybrid": _hybrid("granitemoehybrid", "GraniteMoeHybridForCausalLM", _granite_settings, _restore_paired),
    "falcon-h1": _hybrid("falcon_h1", "FalconH1ForCausalLM", _falcon_h1_settings),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
}
