"""Tiny random models with recurrent layers, one for each kind of state and of place in a layer.

Not a test itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from draftree.models.torch.hf import HFModel
from families import EXPERTS, HEAD_DIM, fresh

DELTA: dict[str, Any] = {
    **HEAD_DIM,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}

ALL: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "mlp_layer_types": ["dense", "dense"],
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {
        **MAMBA2,
        **EXPERTS,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 16,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64, "ssm_in_multiplier": 0.5},
    "nemotron_h": {
        **HEAD_DIM,
        "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_mem_blocks": 1,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_key_value_heads": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 1},
}
RECURRENT = {name: changes for name, changes in ALL.items() if name in CONFIG_MAPPING}
"""Delta nets, a short convolution, and state-space layers, beside attention, together with it, or alone; those that
this version of transformers has."""


def recurrent_model(family: str) -> Any:
    """A new transformers model, always with the same weights."""
    return fresh(family, **RECURRENT[family])


@functools.cache
def recurrent_peer(family: str) -> Any:
    """The model as transformers runs it."""
    return recurrent_model(family)


@functools.cache
def slotted(family: str) -> HFModel:
    """The model with our slots."""
    return HFModel(recurrent_model(family))


@torch.inference_mode()
def last_logits(family: str, tokens: list[int]) -> Tensor:
    """Logits after a text, by the model's own forward pass without a cache, shape (vocab,)."""
    logits: Tensor = recurrent_peer(family)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits
