"""Random targets whose folders also have an MTP layer, as their publishers store them. Not a test itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftree.heads.layouts import Values
from draftree.heads.layouts.mtp import layer_config
from draftree.heads.mtp import MtpHead
from draftree.heads.vocabulary import DraftVocabulary
from families import VOCAB_SIZE

GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 128, "eos_token_id": None,
    "bos_token_id": 1, "pad_token_id": 0, "use_qk_norm": True,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_group": 2, "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
DEEPSEEK = {name: value for name, value in {**GLM, **LATENT}.items() if name not in ("head_dim", "use_qk_norm")}
NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
    "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
QWEN = {**GLM, **NEXT}
QWEN35 = {**{name: value for name, value in QWEN.items() if "expert" not in name}, "model_type": "qwen3_5_text"}
TARGETS = {"glm": GLM, "deepseek": DEEPSEEK, "qwen3-next": QWEN, "qwen3.5": QWEN35}
STORED = {
    "block.": "model.layers.2.", "norm.": "model.layers.2.shared_head.norm.", "": "model.layers.2.",
}  # fmt: skip
STORED_NEXT = {
    "block.": "mtp.layers.0.", "enorm.": "mtp.pre_fc_norm_embedding.", "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.", "": "mtp.",
}  # fmt: skip
"""Names in the folder, by the beginnings of those in the head."""


def target_with_mtp(values: dict[str, Any], folder: Path) -> Path:
    """A random target whose folder also has an MTP layer."""
    known = dict(values)
    config: Any = AutoConfig.for_model(known.pop("model_type"), **known)
    loader: Any = AutoModelForCausalLM
    torch.manual_seed(5)
    loader.from_config(config).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    layer = Values(json.loads((folder / "config.json").read_text()))
    head = MtpHead(layer_config(layer, depth=1, target_name=""), DraftVocabulary.full(VOCAB_SIZE))
    names = STORED_NEXT if values["model_type"].startswith("qwen3") else STORED
    for name, part in head.state_dict().items():
        start = next(start for start in names if name.startswith(start))
        spread = torch.randn(part.shape) * 0.3
        stored[names[start] + name.removeprefix(start)] = 1 + spread if "norm" in name else spread
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
