"""MTP layers of families whose layout or layer differs from DeepSeek's, and what they compute. Not a test itself.

The reference joins the parts as the publishers describe them, with the layers of transformers, their own attention and
a mask that is made here.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftree.heads.config import SLIDING
from families import VOCAB_SIZE as VOCABULARY
from families import _fill

WIDTH = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}


@dataclass(frozen=True, slots=True)
class Family:
    """An MTP layer as a publisher stores it.

    Attributes:
        values: content of `config.json`.
        layer: module and class of the layer in transformers.
        layers: changes of the configuration for the layer.
        names: names of the publisher by those of our head; of several the first that fits counts.
        prefix: beginning of all names of the publisher.
        renamed: parts of names of transformers, and how the publisher calls them.
        hidden_first, has_norm, has_output, adds_one: differences of the parts around the layer; norms that add one to
            their weights.
    """

    values: dict[str, Any]
    layer: str
    layers: dict[str, Any]
    prefix: str
    names: Mapping[str, str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    hidden_first: bool = False
    has_norm: bool = True
    has_output: bool = False
    adds_one: bool = False


OWN = {name: name for name in ("enorm.", "hnorm.", "eh_proj.")}
INSIDE = OWN | {"norm.": "shared_head.norm.", "lm_head.": "shared_head.output.", "block.": ""}
FINAL = INSIDE | {"norm.": "final_layernorm."}
SPARSE = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
SPARSE_INDEX = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 16, "mlp_layer_types": ["dense", "sparse"]}
HUNYUAN = {
    "mlp.gate.weight": "mlp.router.gate.weight", "mlp.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}  # fmt: skip
LING = {
    "self_attn.o_proj.": "attention.dense.",
    "self_attn.": "attention.",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
FAMILIES = {
    "glm-4.7-flash": Family(
        {**NO_HEAD_DIM, **EXPERTS, **LATENT, "model_type": "glm4_moe_lite"},
        "glm4_moe_lite:Glm4MoeLiteDecoderLayer", {"mlp_layer_types": ["sparse"]}, "model.layers.2.", INSIDE,
    ),
    "glm-5": Family(
        {**NO_HEAD_DIM, **EXPERTS, **LATENT, **SPARSE_INDEX, "model_type": "glm_moe_dsa"},
        "glm_moe_dsa:GlmMoeDsaDecoderLayer", {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
        "model.layers.2.", INSIDE,
    ),
    "deepseek-v3.2": Family(
        {**NO_HEAD_DIM, **EXPERTS, **LATENT, **SPARSE_INDEX, "model_type": "deepseek_v32", "first_k_dense_replace": 1},
        "deepseek_v32:DeepseekV32DecoderLayer", {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]},
        "model.layers.2.", INSIDE,
    ),
    "hunyuan-3": Family(
        {**SIZES, **EXPERTS, "model_type": "hy_v3"}, "hy_v3:HYV3DecoderLayer", {"mlp_layer_types": ["sparse"]},
        "model.layers.2.", FINAL, HUNYUAN,
    ),
    "ling-2.5": Family(
        {**NO_HEAD_DIM, **EXPERTS, **LATENT, "model_type": "bailing_hybrid", "layer_group_size": 2},
        "bailing_hybrid:BailingHybridDecoderLayer", SPARSE, "model.layers.2.", FINAL, LING,
    ),
    "mellum": Family(
        {**SIZES, "model_type": "mellum", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "sliding_window": 4, "num_mtp_layers": 1},
        "mellum:MellumDecoderLayer", {"layer_types": [SLIDING], "mlp_layer_types": ["sparse"]}, "mtp.",
        {"enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "eh_proj.": "fc.", "norm.": "norm.",
         "block.": "layers.0."},
    ),
    "mimo": Family(
        {**SIZES, "model_type": "mimo"}, "qwen2:Qwen2DecoderLayer", {"layer_types": ["full_attention"]},
        "model.mtp_layers.0.",
        {"enorm.": "token_layernorm.", "hnorm.": "hidden_layernorm.", "eh_proj.": "input_proj.",
         "norm.": "final_layernorm.", "block.": ""}, hidden_first=True,
    ),
    "mimo-v2": Family(
        {**SIZES, **EXPERTS, "model_type": "mimo_v2_flash", "num_key_value_heads": 1, "v_head_dim": 8,
         "sliding_window_size": 3},
        "mimo_v2_flash:MiMoV2FlashDecoderLayer", {"layer_types": [SLIDING], "mlp_layer_types": ["dense"]},
        "model.mtp.layers.0.", FINAL,
        {"self_attn.sinks": "self_attn.attention_sink_bias", "post_attention_layernorm.": "pre_mlp_layernorm."},
    ),
    "step-3.7": Family(
        {**SIZES, "model_type": "step3p5", "moe_intermediate_size": 32, "n_routed_experts": 4, "share_expert_dim": 16,
         "num_experts_per_tok": 2, "num_nextn_predict_layers": 1, "num_attention_groups": 2, "sliding_window": 4,
         "layer_types": ["full_attention", SLIDING, SLIDING], "moe_layers_enum": "1",
         "rope_theta": [5e6, 1e4, 1e4], "attention_other_setting": {"num_attention_heads": 2}},
        "step3p7:Step3p7DecoderLayer",
        {"layer_types": [SLIDING], "mlp_layer_types": ["dense"], "per_layer_config": {0: {"num_attention_heads": 2}}},
        "model.layers.2.", INSIDE, has_output=True, adds_one=True,
    ),
    "ernie-4.5": Family(
        {**SIZES, "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
        "ernie4_5_moe:Ernie4_5_MoeDecoderLayer", {"moe_layer_start_index": 1}, "model.mtp_",
        {"enorm.": "emb_norm.0.", "hnorm.": "hidden_norm.0.", "eh_proj.": "linear_proj.0.", "block.": "block.0."},
        has_norm=False,
    ),
    "nemotron-h": Family(
        {**SIZES, **EXPERTS, "model_type": "nemotron_h", "hybrid_override_pattern": "*E", "mamba_num_heads": 4,
         "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 16,
         "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        "nemotron_h:NemotronHBlock", {"layer_types": ["full_attention", "moe"]}, "mtp.layers.",
        {"enorm.": "0.enorm.", "hnorm.": "0.hnorm.", "eh_proj.": "0.eh_proj.", "norm.": "1.final_layernorm.",
         "block.": ""},
    ),
}  # fmt: skip


class Reference(nn.Module):
    """A random MTP layer, with parameters by the names of our head."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        from transformers import AutoConfig

        self.family = family
        known = dict(family.values)
        kind = known.pop("model_type")
        config: Any = AutoConfig.for_model("qwen2" if kind == "mimo" else kind, **known)
        config._attn_implementation = "eager"
        for name, value in family.layers.items():
            setattr(config, name, value)
        self.config = config
        epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(WIDTH, eps=epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        if not family.has_norm:
            self.norm = nn.Identity()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False) if family.has_output else None
        module, _, name = family.layer.partition(":")
        made = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
        kinds = family.layers.get("layer_types", [None])
        layers = [made(config, index) for index in range(len(kinds))]
        self.block = layers[0] if len(layers) == 1 else nn.ModuleList(layers)
        generator = torch.Generator().manual_seed(3)
        for name, part in (*self.named_parameters(), *self.named_buffers()):
            if part.is_floating_point() and "inv_freq" not in name:
                base = 1.0 if "norm" in name and part.dim() == 1 else 0.0
                part.data = torch.randn(part.shape, generator=generator) * 0.2 + base
        self.requires_grad_(False)

    def _rotary(self, x: Tensor, places: Tensor) -> Any:
        module = self.family.layer.partition(":")[0]
        theirs = vars(importlib.import_module(f"transformers.models.{module}.modeling_{module}"))
        made = next(
            (part for name, part in theirs.items() if name.endswith("RotaryEmbedding") and "Vision" not in name), None
        )
        if made is None:
            return None
        kind = self.family.layers.get("layer_types", [None])[0]
        nested = kind in (getattr(self.config, "rope_parameters", None) or ())
        return made(self.config)(x, places, **({"layer_type": kind} if nested else {}))

    def forward(self, embedded: Tensor, states: Tensor, places: Tensor) -> Tensor:
        """States of rows after the norm, all of shape (rows, width); `places` are their positions."""
        read = [self._normed(self.enorm, embedded), self._normed(self.hnorm, states)]
        x = self.eh_proj(torch.cat(read[::-1] if self.family.hidden_first else read, dim=-1))[None]
        angles = self._rotary(x, places[None])
        ahead = places[None] - places[:, None]
        hidden = ahead > 0
        if self.family.layers.get("layer_types") == [SLIDING]:
            hidden |= ahead <= -self.config.sliding_window
        mask = torch.zeros(ahead.shape).masked_fill(hidden, -math.inf)[None, None]
        for layer in self.block if isinstance(self.block, nn.ModuleList) else [self.block]:
            x = layer(x, attention_mask=mask, position_embeddings=angles, position_ids=places[None])
            x = x[0] if isinstance(x, tuple) else x
        return self._normed(self.norm, x[0])

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        if isinstance(norm, nn.Identity):
            return x
        return nn.functional.rms_norm(x, (WIDTH,), norm.weight + self.family.adds_one, norm.eps)

    def write(self, folder: Path) -> None:
        """Write it as its publisher does, beside a tensor of its target."""
        embedding = {"model.embed_tokens.weight": torch.zeros(VOCABULARY, WIDTH)}
        save_file(embedding | self.published(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.family.values))

    def published(self) -> dict[str, Tensor]:
        """The tensors by the names of the publisher."""
        family = self.family
        tensors: dict[str, Tensor] = {}
        for name, part in (*self.named_parameters(), *self.named_buffers()):
            if "inv_freq" in name:
                continue
            start = next(start for start in family.names if name.startswith(start))
            stored = name.removeprefix(start)
            for theirs, published in family.renamed.items():
                stored = stored.replace(theirs, published)
            tensors |= split_experts(family.prefix + family.names[start] + stored, part)
        return {name: part.clone().contiguous() for name, part in tensors.items()}


VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def published_target(name: str, folder: Path) -> Path:
    """A random target whose folder also has its MTP layer, as its publisher stores it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    known = dict(FAMILIES[name].values)
    loader: Any = AutoModelForCausalLM
    if name == "step-3.7":
        loader = AutoModelForImageTextToText
        known = {"model_type": "step3p7", "text_config": known, "vision_config": VISION, "image_token_id": 5}
    config: Any = AutoConfig.for_model(known.pop("model_type"), **known)
    torch.manual_seed(5)
    model = loader.from_config(config)
    _fill(model)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | Reference(FAMILIES[name]).published(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Products of experts as publishers store them, one by one; other tensors as they are."""
    base, _, part = name.rpartition("experts.")
    if not base or tensor.dim() != 3:
        return {name: tensor}
    parts = {part: tensor}
    if part == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
    return {f"{base}experts.{i}.{n}.weight": p[i] for n, p in parts.items() for i in range(len(p))}
