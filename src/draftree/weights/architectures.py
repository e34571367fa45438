"""The mapping of GGUF metadata to a transformers configuration, per supported architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftree.core.errors import UnsupportedModelError
from draftree.weights.gguf_file import GgufFile

__all__ = ["ARCHITECTURES", "Architecture"]

Array = np.ndarray[Any, np.dtype[np.float32]]
Settings = dict[str, Any]

GEMMA3_GLOBAL_EVERY = 6
GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture: its names in GGUF and transformers, its configuration, and its tensor layout.

    `restore(name, values, settings)` undoes the changes that the conversion to GGUF made to a tensor; `name` is the
    transformers parameter name.
    """

    model_type: str
    model_class: str
    settings: Callable[[GgufFile], Settings]
    restore: Callable[[str, Array, Settings], Array]


def shared_settings(file: GgufFile) -> Settings:
    """Return the settings that all decoder architectures name alike in GGUF."""
    prefix = file.metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{prefix}.{key}", default)
        if value is None:
            raise file.broken(f"it lacks the key '{prefix}.{key}'")
        return value

    if get("block_count") > len(file.tensors):
        raise file.broken(f"it declares {get('block_count')} layers and has {len(file.tensors)} tensors")
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"'{file.path}' rotates only part of each head, which cannot be unpacked from GGUF: "
            "use the model's own folder"
        )
    return {
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": shortest_float(get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope_parameters(file, theta=get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def rope_parameters(file: GgufFile, *, theta: float) -> Settings:
    """Return the rotary embedding parameters; a file's factors per frequency become transformers' longrope."""
    prefix = file.metadata["general.architecture"]
    parameters: Settings = {"rope_theta": shortest_float(theta), "rope_type": "default"}
    kind = file.metadata.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "linear":
        factor = file.metadata[f"{prefix}.rope.scaling.factor"]
        return parameters if factor == 1 else parameters | {"rope_type": "linear", "factor": shortest_float(factor)}
    if kind != "none":
        raise UnsupportedModelError(
            f"'{file.path}' scales positions by the rule '{kind}', which a GGUF file does not describe completely: "
            "use the model's own folder"
        )
    if "rope_freqs.weight" in file.tensors:
        factors = [float(factor) for factor in file.read("rope_freqs.weight").ravel()]
        context = file.metadata[f"{prefix}.context_length"]
        parameters |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        parameters |= {"attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": context}
    return parameters


def llama_settings(file: GgufFile) -> Settings:
    settings = dense_settings(file)
    return settings | {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def dense_settings(file: GgufFile) -> Settings:
    """Return the settings of an architecture whose models have no experts here."""
    if file.metadata.get(f"{file.metadata['general.architecture']}.expert_count", 0):
        raise UnsupportedModelError(
            f"'{file.path}' is a mixture of experts of an architecture that cannot be unpacked from GGUF: "
            "use the model's own folder"
        )
    return shared_settings(file)


def expert_settings(file: GgufFile) -> Settings:
    """Return the settings of Qwen's models with experts in every layer."""
    settings, prefix = shared_settings(file), file.metadata["general.architecture"]
    keys = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    if prefix == "qwen2moe":
        keys["shared_expert_intermediate_size"] = "expert_shared_feed_forward_length"
    for name, key in keys.items():
        value = file.metadata.get(f"{prefix}.{key}")
        if value is None:
            raise file.broken(f"it lacks the key '{prefix}.{key}'")
        settings[name] = value
    # the files do not say whether the weights of a row's experts are scaled to a sum of 1: Qwen3 does, Qwen2 does not
    return settings | {"norm_topk_prob": prefix == "qwen3moe", "decoder_sparse_step": 1, "mlp_only_layers": []}


def gemma3_settings(file: GgufFile) -> Settings:
    settings = dense_settings(file)
    num_layers, num_heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    is_global = [(layer + 1) % GEMMA3_GLOBAL_EVERY == 0 for layer in range(num_layers)]
    # The one size whose attention is not scaled by its head size; llama.cpp also identifies it by its depth.
    wide = num_layers == GEMMA3_27B_LAYERS
    return settings | {
        "sliding_window": file.metadata["gemma3.attention.sliding_window"],
        "layer_types": ["full_attention" if whole else "sliding_attention" for whole in is_global],
        "query_pre_attn_scalar": settings["hidden_size"] // num_heads if wide else settings["head_dim"],
        "rope_parameters": {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {"rope_theta": GEMMA3_LOCAL_THETA, "rope_type": "default"},
        },
    }


def as_stored(name: str, values: Array, settings: Settings) -> Array:
    return values


def pairs_to_halves(values: Array, num_heads: int) -> Array:
    """Reorder the rows of a query or key projection from adjacent rotated pairs to rotated halves.

    Row 2i + j of a head becomes row j * (head_dim / 2) + i: from the layout of Meta's and llama.cpp's code to
    that of transformers.
    """
    rows, columns = values.shape[0], values.shape[1:]
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, *columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def restore_llama(name: str, values: Array, settings: Settings) -> Array:
    if ".q_proj." in name:
        return pairs_to_halves(values, settings["num_attention_heads"])
    if ".k_proj." in name:
        return pairs_to_halves(values, settings["num_key_value_heads"])
    return values


def restore_gemma(name: str, values: Array, settings: Settings) -> Array:
    # GGUF stores the factor of a normalization, transformers the factor minus one.
    return values - np.float32(1) if "norm" in name else values


def shortest_float(value: float) -> float:
    """Return the shortest decimal number of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", llama_settings, restore_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", dense_settings, as_stored),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", expert_settings, as_stored),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", dense_settings, as_stored),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", expert_settings, as_stored),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", gemma3_settings, restore_gemma),
}
