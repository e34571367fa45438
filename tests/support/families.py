"""Tiny random models of many families, with weights large enough that no pick is a near-tie.

Not a test itself. `target(name)` is the same model in every process; `drafter_folder(name, where)` writes a model
that agrees with it now and then, which is what a drafter should do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftree.loading.transformers_model import wrap_model
from draftree.models.base import LanguageModel

VOCAB_SIZE = 96
CONTEXT = 160
WINDOW = 8
WEIGHT_SCALE = 0.25
HEAD_SCALE = 0.75
"""Wide gaps between logits: at temperature 1 the distributions still have a few likely tokens only."""
DRAFTER_DISTANCE = 0.06
"""Share of the target's weights by which the drafter's are off: it is then right in some rounds, not in all."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
HEAD_DIM: dict[str, Any] = {"head_dim": 8}
ALL_HEADS: dict[str, Any] = {"num_key_value_heads": 4}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

SHARED: dict[str, Any] = {
    **HEAD_DIM,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
"""The last layers read the keys and values of earlier ones."""

SLOTTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    "qwen3": HEAD_DIM,
    "qwen3_moe": {**HEAD_DIM, **EXPERTS, "moe_intermediate_size": 16},
    "gemma": HEAD_DIM,
    "gemma2": {**HEAD_DIM, **MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**HEAD_DIM, **MIXED, "query_pre_attn_scalar": 8},
    "gpt2": {"tie_word_embeddings": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "phi": {},
    "phi3": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": EXPERTS,
    "olmo2": {},
    "starcoder2": {},
    "cohere": {"tie_word_embeddings": True, "logit_scale": 1.0},
    "cohere2": {**MIXED, "tie_word_embeddings": True, "logit_scale": 1.0},
    "granite": {},
    "smollm3": {},
    "gpt_oss": {**HEAD_DIM, **MIXED, **EXPERTS},
    "stablelm": {},
    "glm4": HEAD_DIM,
    "roberta": {**ALL_HEADS, "is_decoder": True, "type_vocab_size": 1},
    "granitemoehybrid": {
        "layer_types": ["attention", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
    },
    "gemma3n_text": {
        **SHARED,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {**SHARED, "global_head_dim": 16},
    "deepseek_v3": {
        **ALL_HEADS,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
"""Families that call the registered attention: our slots, trees."""

BART: dict[str, Any] = {
    "forced_eos_token_id": None,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "encoder_layers": 1,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
}

CACHED: dict[str, dict[str, Any]] = {
    "bart": BART,
    "pegasus": BART,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "num_heads": 4},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "falcon-alibi": {"new_decoder_architecture": False, "multi_query": False, "alibi": True},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": CONTEXT},
    "llama4_text": {**HEAD_DIM, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW},
    "phimoe": {**EXPERTS, "sliding_window": WINDOW},
    "qwen2_moe": {
        **MIXED,
        **EXPERTS,
        "use_sliding_window": True,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
"""Families with an attention or a window of their own: transformers' cache, chains only."""

if Version(transformers.__version__) >= Version("5.24"):
    # these families call the registered attention from this version on
    SLOTTED |= {name: CACHED.pop(name) for name in ("gptj", "codegen")}

UNDIVIDED = frozenset({"gemma3n_text", "gemma4_text"})
"""Slotted families of which no part can run alone, since layers read keys and values of others."""
DIVIDED = frozenset(SLOTTED) - UNDIVIDED

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
    "qwen3_next": {
        **HEAD_DIM,
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""Families with recurrent states: our slots, trees."""

SPARSE: dict[str, Any] = {
    **ALL_HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 8,
}
SPARSE_FAMILIES: dict[str, dict[str, Any]] = {"deepseek_v32": SPARSE, "glm_moe_dsa": SPARSE}
"""Families that attend to tokens which an index chooses."""

REREAD: dict[str, dict[str, Any]] = {"openai": {"n_embd": 32, "n_layer": 2, "n_head": 4}}
"""Families without a cache: each pass reads the whole text."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cpmant": ({"dim_head": 8, "dim_ff": 48, "prompt_length": 2}, "other logits token by token than in one pass"),
    "xlnet": ({"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, "in place of a mask that it appends"),
}
"""Families that do not continue a text from the tokens before, and how the refusal puts it."""

ENCODERS: dict[str, dict[str, Any]] = {"bert": ALL_HEADS}
"""Families whose rows attend to later tokens, so that texts cannot be decoded token by token."""

CHAINS = {**CACHED, **SPARSE_FAMILIES, **REREAD}
"""All families that score chains only."""
OTHERWISE = {name: changes for name, (changes, _) in REFUSED.items()}
FAMILIES = {**SLOTTED, **RECURRENT, **CHAINS, **OTHERWISE, **ENCODERS}
KINDS = {"openai": "openai-gpt"}
"""How transformers calls a family whose name here must have no dash."""


def fresh(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A new transformers model of a family, always with the same weights; `changes` go into its configuration."""
    kind = KINDS.get(name, name.split("-")[0])
    common = {key: value for key, value in COMMON.items() if kind != "xlnet" or key in ("vocab_size", "pad_token_id")}
    config = AutoConfig.for_model(kind, **(common | FAMILIES.get(name, {}) | changes))
    with torch.random.fork_rng([]):  # a test's own seed stays as it is, whichever test makes the model
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model)
    return model.to(dtype).eval()


@torch.no_grad()
def _fill(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(values * (HEAD_SCALE if "lm_head" in name else WEIGHT_SCALE))
        else:
            # norms start at 1 or 0 and biases at 0: a little off, so that they count; what starts at random is replaced
            is_constant = bool((parameter == parameter[0]).all())
            parameter.copy_(values * 0.1 + (parameter if is_constant else 0.0))


@functools.cache
def peer(name: str) -> Any:
    """The family's model as transformers runs it."""
    return fresh(name)


@functools.cache
def target(name: str) -> LanguageModel:
    """The family's model as a `LanguageModel`, with its own weights."""
    return wrap_model(fresh(name), name=name).model


@torch.no_grad()
def drafter_folder(name: str, where: Path, *, distance: float = DRAFTER_DISTANCE, **changes: Any) -> Path:
    """A folder with a model like the family's, with perturbed matrices."""
    folder = where / "-".join([name, str(distance), *map(str, changes.values())])
    if not folder.exists():
        model = fresh(name, **changes)
        generator = torch.Generator().manual_seed(2)
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.mul_(1 + distance * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
    return folder


def prompts(*lengths: int) -> list[list[int]]:
    """Prompts of these lengths with runs that occur twice, so that lookups find something."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in lengths:
        part: Tensor = torch.randint(3, VOCAB_SIZE, (max(1, length // 2 + 1),), generator=generator)
        found.append(part.repeat(2)[:length].tolist())
    return found


def transformers_greedy(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What transformers writes at temperature 0, one prompt at a time."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()
