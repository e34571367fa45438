"""GGUF architectures with recurrent layers: short convolutions, gated delta nets and Mamba2.

llama.cpp's converter changes some parameters, which are changed back here: the decay `A_log` is stored as -exp(A_log),
a filter of one channel without that dimension, a zero-centred normalization plus one, and the value heads of delta
nets with fewer key heads are tiled over them, not grouped by them. Falcon-H1's multipliers are folded into its weights,
so that its configuration has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from draftree.core.errors import UnsupportedModelError
from draftree.weights.gguf_families import (
    JOINED,
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

MIXER = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
FEED_FORWARD = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "expert_bias": "exp_probs_b.bias",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "experts.gate_up_proj": f"ffn_gate_exps.weight{JOINED}ffn_up_exps.weight",
    "experts.up_proj": "ffn_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}
STATE = {
    "in_proj": "ssm_in",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_qkvz": f"attn_qkv{JOINED}attn_gate",
    "in_proj_ba": "ssm_ba",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "conv1d": "ssm_conv1d",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
PARTS: dict[str, dict[str, str]] = {
    "self_attn": MIXER | {"out_proj": "attn_output", "q_layernorm": "attn_q_norm", "k_layernorm": "attn_k_norm"},
    "linear_attn": STATE,
    "mamba": STATE,
    "mixer": MIXER | FEED_FORWARD | STATE,
    "conv": {"conv": "shortconv.conv", "in_proj": "shortconv.in_proj", "out_proj": "shortconv.out_proj"},
    "mlp": FEED_FORWARD,
    "feed_forward": FEED_FORWARD,
    "block_sparse_moe": FEED_FORWARD,
    "shared_mlp": {"input_linear": f"ffn_gate{JOINED}ffn_up", "output_linear": "ffn_down"},
}
"""Tensors by the module of a layer and its part, in transformers' words."""
NORMS = {
    "operator_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.embeddings": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "model.norm_f": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}
IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def tensor_name(parameter: str, file: GgufFile) -> str | None:
    """Return the tensor of a parameter, several joined by `JOINED`; None for an unknown parameter."""
    inside = IN_LAYER.fullmatch(parameter)
    if inside is None:
        stem, suffix = _suffixed(parameter)
        return f"{OUTSIDE[stem]}{suffix}" if stem in OUTSIDE else None
    module, _, part = inside[2].partition(".")
    parts, path = (PARTS[module], part) if module in PARTS else (NORMS, inside[2])
    if path in parts:
        stored = parts[path].split(JOINED)
    else:
        stem, suffix = _suffixed(path)
        if stem not in parts:
            return None
        stored = [f"{part}{suffix}" for part in parts[stem].split(JOINED)]
    return JOINED.join(_spelled(f"blk.{inside[1]}.{part}", file) for part in stored)


def _suffixed(name: str) -> tuple[str, str]:
    stem, _, last = name.rpartition(".")
    return (stem, f".{last}") if last in ("weight", "bias") else (name, "")


def _spelled(name: str, file: GgufFile) -> str:
    """Return a tensor's name as the file has it, where architectures have different ones."""
    others = (
        name.replace(".post_attention_norm.", ".ffn_norm."),  # Granite
        re.sub(r"(ffn_(gate|up|down))\.", r"\1_shexp.", name),  # Granite's shared expert
        name.removesuffix(".weight"),  # the norms of Falcon-H1's perceptrons
    )
    return next((other for other in (name, *others) if other in file.tensors), name)


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
    return Architecture(model_type, model_class, settings, restore, stored_layout, tensor_name, group)


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
