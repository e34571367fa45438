"""Tiny models of the families with native kernels. Not a test itself."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from draftree.models.native.describe import plan_lowering, plan_model
from draftree.models.native.model import NativeModel
from draftree.models.native.weights import ModelWeights
from draftree.models.torch.hf import HFModel
from families import VOCAB_SIZE, fresh

in_c = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")
"""Marks tests of native kernels."""
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 400}
WINDOW: dict[str, Any] = {"sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"]}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
LATENT_EXPERTS: dict[str, Any] = {
    **LATENT,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True},
    "mistral": {"sliding_window": 37},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "smollm3": {"no_rope_layers": [0, 1]},
    "gpt2": {"n_inner": 96, "tie_word_embeddings": True, "activation_function": "gelu"},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": {},
    "phi": {},
    "starcoder2": {"sliding_window": 37},
    "stablelm": {},
    "gemma2": {
        **WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.5},
    "cohere2": {**WINDOW, "tie_word_embeddings": True, "logit_scale": 0.5},
    "glm": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"partial_rotary_factor": 0.5},
    "helium": {},
    "ernie4_5": {},
    "nemotron": {},
    "arcee": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "exaone4": {**WINDOW, "sliding_window_pattern": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 16},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0, "eos_token_id": 1},
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention", "full_attention"],
    },
    "gpt_oss": WINDOW,
    "deepseek_v2": {**LATENT_EXPERTS, "topk_method": "greedy", "q_lora_rank": None},
    "deepseek_v3": LATENT_EXPERTS | {"q_lora_rank": 64},
    "glm4_moe_lite": {**LATENT_EXPERTS, "v_head_dim": 48},
    "minicpm3": LATENT,
}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 48,
}
SPARSE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
ZAMBA: dict[str, Any] = {  # small: attention to wide inputs with random weights is sharp, which amplifies rounding
    "hidden_size": 32,
    "head_dim": 16,
    "n_mamba_heads": 4,
    "mamba_d_state": 16,
    "tie_word_embeddings": True,
    "num_logits_to_keep": 0,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    },
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "sliding_window": 37,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
    },
    "qwen3_next": {**DELTA, **SPARSE, "mlp_only_layers": [0]},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SPARSE},
    "olmo_hybrid": {**DELTA, "linear_allow_neg_eigval": True},
    "kimi_linear": {
        **LATENT_EXPERTS,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "q_lora_rank": None,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1], "num_logits_to_keep": 0},
    "granitemoehybrid": {
        **MAMBA,
        "layers_block_type": LAYERS,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 64,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "falcon_h1": {
        **MAMBA,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "num_logits_to_keep": 0,
        "attention_in_multiplier": 0.5,
        "attention_out_multiplier": 0.3,
        "key_multiplier": 0.5,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.2,
        "ssm_multipliers": [0.75, 0.5, 1.5, 1.25, 0.5],
        "mlp_multipliers": [0.75, 0.2],
        "embedding_multiplier": 5.0,
        "lm_head_multiplier": 0.5,
    },
    "zamba2": {
        **ZAMBA,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "mamba_ngroups": 2,
        "num_key_value_heads": 4,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 2,
        "intermediate_size": 32,
        "use_mem_rope": True,
    },
    "zamba2-nope": {
        **ZAMBA,
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "adapter_rank": 8,
    },
    "nemotron_h": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "num_logits_to_keep": 0,
    },
    "nemotron_h-experts": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "num_logits_to_keep": 0,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
    },
}
"""Families with recurrent layers."""
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
QUANTIZED = ("int8", "int4")
EXPERTS = (
    *("olmoe", "flex_olmo", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
"""Families with experts."""


def kinds_of(families: Iterable[str]) -> list[tuple[str, str]]:
    """Families with each kind of weights."""
    return [(family, kind) for family in families for kind in DTYPES]


def lower(model: HFModel, *, quantization: str | None = None) -> NativeModel:
    """The same model with native kernels. It gives up its own weights."""
    return NativeModel(plan_lowering(model), ModelWeights(model.model), quantization=quantization)


def lowered(family: str, kind: str = "float32", **others: Any) -> NativeModel:
    quantization = kind if kind in QUANTIZED else None
    if family in HYBRIDS:
        model = fresh(family, dtype=DTYPES[kind], **(SIZES | HYBRIDS[family] | others))
        return NativeModel(plan_model(model), ModelWeights(model), quantization=quantization)
    return lower(
        HFModel(fresh(family, dtype=DTYPES[kind], **(SIZES | FAMILIES[family] | others))), quantization=quantization
    )


@functools.cache
def native(family: str, kind: str = "float32") -> NativeModel:
    return lowered(family, kind)


def text(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens
