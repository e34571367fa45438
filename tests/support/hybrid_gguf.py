"""Tiny models with recurrent layers, and their GGUF files in the layouts that llama.cpp's converter gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from weights_samples import PIECES, add_byte_level, halves_to_pairs

Array = np.ndarray[Any, Any]

SIZES: dict[str, Any] = {
    "vocab_size": len(PIECES),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 259,
    "pad_token_id": None,
}
FULL, CONVOLUTION, RECURRENT = "full_attention", "conv", "linear_attention"
TIED: dict[str, Any] = {"tie_word_embeddings": True}
APART: dict[str, Any] = {"tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHORT: dict[str, Any] = {"layer_types": [CONVOLUTION, FULL, CONVOLUTION], "conv_L_cache": 3, **TIED}
DELTA: dict[str, Any] = {
    "layer_types": [RECURRENT, FULL, RECURRENT],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
SECTIONED = DELTA["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
SHARED = {"shared_expert_intermediate_size": 24}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
GRANITE: dict[str, Any] = {
    **MAMBA,
    "layer_types": [RECURRENT, FULL, RECURRENT],
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "position_embedding_type": "nope",
    "shared_intermediate_size": 48,
}
FALCON: dict[str, Any] = {
    **MAMBA,
    "mamba_d_ssm": 64,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "head_dim": 8,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.6,
    "ssm_out_multiplier": 1.2,
    "mlp_multipliers": [0.8, 0.9],
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
}
NEMOTRON: dict[str, Any] = {
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 16,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
NO_ROUTED: dict[str, Any] = {"num_local_experts": 0, "num_experts_per_tok": 0}

HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("lfm2", "lfm2", {**SHORT, "block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2moe", "lfm2_moe", {**SHORT, **EXPERTS, "num_dense_layers": 1}),
    "qwen3next": ("qwen3next", "qwen3_next", {**DELTA, **EXPERTS, **SHARED, **APART}),
    "qwen35": ("qwen35", "qwen3_5_text", {**DELTA, "rope_parameters": SECTIONED, **TIED}),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", {**DELTA, **EXPERTS, **SHARED, "rope_parameters": SECTIONED}),
    "granitehybrid": ("granitehybrid", "granitemoehybrid", {**GRANITE, **NO_ROUTED, **TIED}),
    "granitehybrid-moe": (
        "granitehybrid",
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "falcon-h1": ("falcon-h1", "falcon_h1", FALCON),
    "nemotron_h": ("nemotron_h", "nemotron_h", {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention"]}),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        "nemotron_h",
        {**NEMOTRON, **ROUTED, "layers_block_type": ["mamba", "moe", "attention"]},
    ),
}
"""The architecture in GGUF, the model type, and the sizes of a tiny model."""


def hybrid_model(family: str, **changes: Any) -> PreTrainedModel:
    """A model whose every weight is random, and whose states forget slowly enough that early tokens matter."""
    _, model_type, settings = HYBRIDS[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **settings, **changes}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, values in model.state_dict().items():
            scale = 0.3 if values.ndim == 1 or "conv" in name else values.shape[-1] ** -0.5
            noise = torch.randn(values.shape, generator=generator) * scale
            values.copy_(noise + (1 if re.search(r"norm|\.D$", name) and "qwen3" not in model_type else 0))
    return model.eval()


def write_hybrid(family: str, path: Path, *, model: PreTrainedModel | None = None, kind: str = "F32",
                 **keys: Any) -> None:  # fmt: skip
    """Write a family's model; matrices become blocks of the kind. `keys` that are None are left out."""
    model = model or hybrid_model(family)
    architecture = HYBRIDS[family][0]
    writer = gguf.GGUFWriter(path, architecture)
    add_byte_level(writer, "qwen2", ["<|end|>"], model.config.vocab_size)
    for key, value in (_keys(architecture, model.config) | keys).items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    for name, values in _tensors(architecture, model):
        wanted = gguf.GGMLQuantizationType[kind]
        if is_small(name, values) or kind == "F32":
            # llama.cpp's quantizer leaves out a first dimension of 1
            is_one = kind != "F32" and values.shape[0] == 1 and values.ndim == 2
            writer.add_tensor(name, values[0] if is_one else values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_small(name: str, values: Array) -> bool:
    """Whether llama.cpp keeps a tensor in float32."""
    return values.ndim == 1 or bool(re.search(r"conv1d|shortconv\.conv\.|ssm_(a|d|norm)\b|ffn_gate_inp", name))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _keys(architecture: str, config: Any) -> dict[str, Any]:
    types = list(config.layer_types)
    key_heads = config.num_key_value_heads
    rope = getattr(config, "rope_parameters", None) or {}
    keys = {
        "block_count": len(types),
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [key_heads if kind == FULL else 0 for kind in types],
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }
    if getattr(config, "moe_intermediate_size", None) and architecture != "nemotron_h":
        keys |= {
            "expert_count": getattr(config, "num_experts", None) or config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if not architecture.startswith("nemotron"):
        keys["attention.layer_norm_rms_epsilon"] = config.norm_eps if "lfm2" in architecture else config.rms_norm_eps
    more: dict[str, Callable[[Any], dict[str, Any]]] = {
        "lfm2": lambda config: {"shortconv.l_cache": config.conv_L_cache},
        "lfm2moe": lambda config: {
            "shortconv.l_cache": config.conv_L_cache,
            "leading_dense_block_count": config.num_dense_layers,
        },
        "qwen3next": _delta_keys,
        "qwen35": _delta_keys,
        "qwen35moe": _delta_keys,
        "granitehybrid": _granite_keys,
        "falcon-h1": lambda config: _mamba_keys(config) | _head_keys(config) | {"attention.head_count_kv": key_heads},
        "nemotron_h": _nemotron_keys,
        "nemotron_h_moe": _nemotron_keys,
    }
    return keys | more[architecture](config)


def _head_keys(config: Any) -> dict[str, Any]:
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _delta_keys(config: Any) -> dict[str, Any]:
    keys = _head_keys(config) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == RECURRENT for kind in config.layer_types],
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }
    if sections := config.rope_parameters.get("mrope_section"):
        keys["rope.dimension_sections"] = [*sections, 0]
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        keys["expert_shared_feed_forward_length"] = shared
    return keys


def _mamba_keys(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _granite_keys(config: Any) -> dict[str, Any]:
    return _mamba_keys(config) | {
        "context_length": 1 << 20,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.scaling.finetuned": False,
    }


def _nemotron_keys(config: Any) -> dict[str, Any]:
    inner = config.mamba_num_heads * config.mamba_head_dim
    keys = _head_keys(config) | {
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": config.mamba_num_heads,
        "rope.scaling.finetuned": False,
    }
    width = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    keys["feed_forward_length"] = [width.get(kind, 0) for kind in config.layer_types]
    if "moe" in config.layer_types:
        keys |= {
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group,
        }
    return keys


def _tensors(architecture: str, model: PreTrainedModel) -> Iterator[tuple[str, Array]]:
    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, len(config.layer_types))
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        for stored, part in _split(architecture, name, values, config):
            spelled = stored if stored.startswith("blk.") else names.get_name(stored, (".weight", ".bias"))
            if spelled is None:
                raise AssertionError(f"llama.cpp has no tensor for {name}")
            yield spelled, np.ascontiguousarray(_stored(architecture, name, part, config))


def _split(architecture: str, name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The names under which llama.cpp's converter looks for tensors, and parts of one that it separates."""
    layer = f"blk.{name.split('.')[2]}." if name.startswith("model.layers.") else ""
    last = name.rpartition(".")[2]
    if last == "gate_up_proj":
        gate, up = np.split(values, 2, axis=1)
        yield from ((f"{layer}ffn_gate_exps.weight", gate), (f"{layer}ffn_up_exps.weight", up))
    elif ".experts." in name:
        yield f"{layer}ffn_{'down' if last == 'down_proj' else 'up'}_exps.weight", values
    elif "input_linear" in name:
        end = "_shexp.weight" if config.num_local_experts else ".weight"
        gate, up = np.split(values, 2)
        yield from ((f"{layer}ffn_gate{end}", gate), (f"{layer}ffn_up{end}", up))
    elif "output_linear" in name:
        yield f"{layer}ffn_down{'_shexp' if config.num_local_experts else ''}.weight", values
    elif "in_proj_qkvz" in name:
        groups, size = config.linear_num_key_heads, config.linear_key_head_dim
        heads = values.reshape(groups, -1, values.shape[1])
        wide = (heads.shape[1] - 2 * size) // 2
        query, key, value, gate = (
            part.reshape(-1, values.shape[1]) for part in np.split(heads, [size, 2 * size, 2 * size + wide], axis=1)
        )
        yield f"{layer}attn_qkv.weight", np.concatenate([query, key, value])
        yield f"{layer}attn_gate.weight", gate
    elif "block_sparse_moe.router" in name:
        yield f"{layer}ffn_gate_inp.weight", values
    elif last in ("expert_bias", "e_score_correction_bias"):
        yield f"{layer}exp_probs_b.bias", values
    else:
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if architecture.startswith("nemotron") and ".mixer." in name:
            name = name.replace("model.layers.", "backbone.layers.")
        yield name, values


def _stored(architecture: str, name: str, values: Array, config: Any) -> Array:
    """The values as llama.cpp's converter changes them."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        values = values[:, 0]
    if architecture.startswith("qwen3"):
        if name.endswith("norm.weight") and "linear_attn" not in name:
            values = values + 1
        return _tiled(name, values, config) if architecture.startswith("qwen35") else values
    if name.endswith((".A_log", ".D")):
        values = values[:, None]
    if "mamba.norm" in name or "mixer.norm" in name:
        groups = getattr(config, "mamba_n_groups", 0) or config.n_groups
        values = values.reshape(groups, -1)
    if architecture.startswith(("granite", "nemotron")):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        own = next((count for word, count in heads.items() if word in name), None)
        return values if own is None else halves_to_pairs(values, own)
    return values * _folded(name, config) if architecture == "falcon-h1" else values


def _tiled(name: str, values: Array, config: Any) -> Array:
    """Value heads one of each key head after another, not all of a key head together."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return values
    if "out_proj" in name:
        return _heads_tiled(values.T, groups, heads).T
    first = 2 * groups * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    return np.concatenate([values[:first], _heads_tiled(values[first:], groups, heads)])


def _heads_tiled(values: Array, groups: int, heads: int) -> Array:
    size = len(values) // heads
    order = [group * (heads // groups) + turn for turn in range(heads // groups) for group in range(groups)]
    return np.concatenate([values[head * size : (head + 1) * size] for head in order])


def _folded(name: str, config: Any) -> Any:
    """The factor of a parameter that Falcon-H1's multipliers give."""
    if "mamba.in_proj" in name:
        inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = [inner, inner, state, state, config.mamba_n_heads]
        return config.ssm_in_multiplier * np.repeat(np.float32(config.ssm_multipliers), sizes)[:, None]
    factors = {
        "mamba.out_proj": config.ssm_out_multiplier,
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return next((np.float32(factor) for part, factor in factors.items() if part in name), np.float32(1))
