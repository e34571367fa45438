"""Sizes of the tiny models of the zoo. Not a test itself."""

from __future__ import annotations

from typing import Any

from families import COMMON, WINDOW

SIZES: dict[str, Any] = COMMON | {
    "d_model": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 160,
    "head_dim": 8,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "ffn_dim": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "is_decoder": True,
    "embedding_size": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "sliding_window": WINDOW,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "n_groups": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 8,
}
"""Keyed by all names that families use for them."""
LATENT: dict[str, Any] = {"head_dim": 4, "num_key_value_heads": 4}
"""For families whose keys are made from a latent vector."""
LINEAR_THEN_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
BASIC_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
INDEXED: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}
NOTE: dict[str, Any] = {
    "layer_types": ["indexed_attention", "sliding_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 8,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "encoder_hash_byte_group_vocab": 50,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": BASIC_ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 16, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 4,
    },
    "dots3_note": {
        "text_config": NOTE,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense", "dense"]},
        "audio_config": {"downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": NOTE,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_d_state": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "kimi_linear": LINEAR_THEN_FULL | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 8},
    "moshi": {"sliding_window": 64},
    "phi4_multimodal": {
        "audio_config": {
            "num_blocks": 1,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
            "bias_max_distance": 10,
        }
    },
    "qwen3_5": {"text_config": LINEAR_THEN_FULL},
    "qwen3_5_moe": {"text_config": LINEAR_THEN_FULL},
    "qwen3_5_moe_text": LINEAR_THEN_FULL,
    "qwen3_5_text": LINEAR_THEN_FULL,
    "qwen4_exp": {"text_config": INDEXED},
    "qwen4_exp_text": INDEXED,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": WINDOW},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 2},
    "roc_bert": {
        "concat_input": False,
        "enable_pronunciation": False,
        "enable_shape": False,
        "pronunciation_vocab_size": 4,
        "shape_vocab_size": 4,
    },
    "xlnet": {"d_inner": 48},
    "xlstm": {"hidden_size": 128, "num_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs beside or instead, nested as its configuration is."""

TARGET = "it reads the keys and values of a target beside tokens, so that generate alone cannot run it"
CODES = "generate of a decoder alone has no such model: it reads several codes of audio at a time"
UNMADE: dict[str, str] = {
    "gemma3n": "its vision encoder needs another package, timm; gemma3n_text is made",
    "gemma4_assistant": TARGET,
    "gemma4_unified_assistant": TARGET,
    "musicgen": CODES,
    "musicgen_melody": CODES,
}
"""Families of which there is no tiny model that generate can run, and why."""
