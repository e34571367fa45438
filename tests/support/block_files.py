"""GGUF files of tiny random models in blocks of any kind. Not a test itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from block_kinds import write_in_blocks
from weights_samples import PIECES, random_weights, write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": len(PIECES),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 400,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
WINDOWED: dict[str, Any] = {
    "num_hidden_layers": 7,
    "sliding_window": 4,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": ROPE | {"rope_theta": 1e6}, "sliding_attention": ROPE},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
}
EXPERT_KEYS = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 256}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 512, "norm_topk_prob": False, "use_sliding_window": False}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen2moe": ("qwen2_moe", EXPERTS | SHARED, EXPERT_KEYS | {"expert_shared_feed_forward_length": 512}),
    "qwen3moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}, EXPERT_KEYS),
    "gemma3": ("gemma3_text", WINDOWED, {"rope_freq_base": 1e6, "sliding_window": 4}),
}


def written(
    folder: Path,
    family: str = "llama",
    kind: str = "Q8_0",
    *,
    others: dict[str, str] | None = None,
    sizes: dict[str, Any] | None = None,
    **header: Any,
) -> Path:
    """A file of random weights; `others` are kinds of matrices whose name contains a word, `header` as `write_gguf`."""
    model_type, changes, keys = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **(SIZES | changes | (sizes or {})))
    model = random_weights(AutoModelForCausalLM.from_config(config), seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    write_gguf(model, folder / "plain.gguf", family, **keys, **header)
    given = others or {}
    write_in_blocks(
        folder / "plain.gguf",
        folder / "model.gguf",
        lambda name: next((found for word, found in given.items() if word in name), kind),
    )
    return folder / "model.gguf"
