"""Tiny random models of every causal family that transformers can make, and what the drop-in makes of each.

Not a test itself. `python tests/support/zoo.py [FAMILY ...]` sweeps over all of them, greedily, one prompt and a padded
batch, and prints for each whether the tokens are those of `generate`, the message of the refusal, or how it failed.
The exit status is 1 if a text differs or an error is none of Draftree's.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import draftree
from draftree.core.errors import DraftreeError
from dropin_samples import padded, plain
from families import COMMON, ENCODERS, FAMILIES, WINDOW, _fill

MOST_PARAMETERS = 4_000_000
SAME, REFUSED, DIFFERENT, CRASHED, NOT_MADE = "same", "refused", "different", "crashed", "not made"

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
}
"""Keyed by all names that families use for them."""
LATENT: dict[str, Any] = {"head_dim": 4, "num_key_value_heads": 4}
"""For families whose keys are made from a latent vector."""
CHANGES: dict[str, dict[str, Any]] = {
    "xmod": {"default_language": "en_XX"},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}


@dataclass(frozen=True, slots=True)
class Result:
    """The result for one family: one of the outcomes above, and its message."""

    family: str
    outcome: str
    words: str = ""


def all_families() -> list[str]:
    """Those of transformers with a causal model, by model type."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """A configuration with all sizes small."""
    if family in FAMILIES.keys() - ENCODERS.keys():
        return AutoConfig.for_model(family, **(COMMON | FAMILIES[family]))
    base = AutoConfig.for_model(family)
    renamed = getattr(type(base), "attribute_map", {})
    names = {renamed.get(name, name): value for name, value in SIZES.items() if hasattr(base, name)}
    chosen = {name: value for name, value in names.items() if name == "pad_token_id" or _is_set(base, name)}
    if hasattr(base, "qk_rope_head_dim"):
        chosen |= LATENT
    return type(base)(**(chosen | {"eos_token_id": None, "tie_word_embeddings": False} | CHANGES.get(family, {})))


def _is_set(base: Any, name: str) -> bool:
    optional = ("sliding_window", "head_dim", "q_lora_rank")
    return name not in optional or getattr(base, name, None) is not None


def tiny_model(family: str) -> Any:
    """A tiny model of the family, always with the same weights.

    Raises:
        ValueError: its sizes go by other names, and it would be large.
    """
    config = tiny_config(family)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    count = sum(parameter.numel() for parameter in shape.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model)
    return model.eval()


def compare(family: str, *, draft: str = "ngram,min=1") -> Result:
    """Tokens of the drop-in compared with those of `generate`: one prompt, and a batch with padding."""
    try:
        model = tiny_model(family)
        batches = [padded(14), padded(14, 9, 3)]
        wanted = [plain(model, inputs) for inputs in batches]
    except Exception as error:  # no tiny model, or one that transformers itself cannot run
        return Result(family, NOT_MADE, _words(error))
    for inputs, tokens in zip(batches, wanted, strict=True):
        try:
            got = plain(model, inputs, custom_generate=draftree.generate, draft=draft)
        except DraftreeError as error:
            return Result(family, REFUSED, str(error))
        except Exception as error:
            return Result(family, CRASHED, _words(error))
        if not torch.equal(got, tokens):
            return Result(family, DIFFERENT, f"batch of {len(tokens)}")
    return Result(family, SAME)


def _words(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


def main(families: list[str]) -> int:
    """Sweep over these families, or all; 1 if one differs or crashes."""
    counts: Counter[str] = Counter()
    for family in families or all_families():
        with contextlib.redirect_stderr(None):
            result = compare(family)
        counts[result.outcome] += 1
        print(f"{result.outcome:<10} {family:<26} {result.words}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return int(bool(counts[DIFFERENT] or counts[CRASHED]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
