"""GGUF architectures of attention layers: their configuration in transformers, and what the conversion changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftree.core.errors import UnsupportedModelError
from draftree.weights.gguf_file import GgufFile

Array = np.ndarray[Any, np.dtype[np.float32]]
Settings = dict[str, Any]
Shape = tuple[int, ...]

JOINED = "+"  # between the names of tensors that make one parameter

GEMMA3_GLOBAL_EVERY = 6
GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_27B_LAYERS = 62


def stored_shape(name: str, shape: Shape) -> Shape:
    """Return the shape of a tensor with a first dimension of 1, which llama.cpp leaves out."""
    return (1, *shape) if name.endswith(".shared_expert_gate.weight") and len(shape) == 1 else shape


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture: its names in GGUF and transformers, its configuration, and its tensor layout.

    `restore(name, values, settings)` undoes the changes that the conversion to GGUF made to a tensor, and
    `layout(name, shape)` returns the shape that this gives; `name` is the transformers parameter name.
    `group(name, values, settings)` undoes an order of heads, by which columns of matrices move as well.
    """

    model_type: str
    model_class: str
    settings: Callable[[GgufFile], Settings]
    restore: Callable[[str, Array, Settings], Array]
    layout: Callable[[str, Shape], Shape] = lambda _, shape: shape
    group: Callable[[str, Array, Settings], Array] | None = None


def num_layers_of(file: GgufFile) -> int:
    """Return the number of layers, without those that predict further tokens."""
    count: int = file.setting("block_count")
    if count > len(file.tensors):
        raise file.broken(f"it declares {count} layers and has {len(file.tensors)} tensors")
    return count - int(file.setting("nextn_predict_layers", 0))


def shared_settings(file: GgufFile) -> Settings:
    settings = decoder_settings(file)
    if file.setting("rope.dimension_count", settings["head_dim"]) != settings["head_dim"]:
        raise UnsupportedModelError(
            f"'{file.path}' rotates only part of each head, which cannot be unpacked from GGUF: "
            "use the model's own folder"
        )
    return settings


def decoder_settings(file: GgufFile) -> Settings:
    get = file.setting
    num_layers = num_layers_of(file)
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    # Nemotron-H's files use the key of another normalization
    other_epsilon = file.metadata.get(f"{file.metadata['general.architecture']}.attention.layer_norm_epsilon")
    return {
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": shortest_float(get("attention.layer_norm_rms_epsilon", other_epsilon)),
        "rope_parameters": rope_parameters(file, theta=get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def rope_parameters(file: GgufFile, *, theta: float) -> Settings:
    """Return the rotary embedding parameters; a file's factors per frequency become transformers' longrope."""
    parameters: Settings = {"rope_theta": shortest_float(theta), "rope_type": "default"}
    kind = file.setting("rope.scaling.type", "none")
    if kind == "linear":
        factor = file.setting("rope.scaling.factor")
        return parameters if factor == 1 else parameters | {"rope_type": "linear", "factor": shortest_float(factor)}
    if kind != "none":
        raise UnsupportedModelError(
            f"'{file.path}' scales positions by the rule '{kind}', which a GGUF file does not describe completely: "
            "use the model's own folder"
        )
    if "rope_freqs.weight" in file.tensors:
        factors = [float(factor) for factor in file.read("rope_freqs.weight").ravel()]
        parameters |= {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": file.setting("context_length"),
        }
    return parameters


def _llama_settings(file: GgufFile) -> Settings:
    settings = dense_settings(file)
    return settings | {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def dense_settings(file: GgufFile) -> Settings:
    if file.setting("expert_count", 0):
        raise UnsupportedModelError(
            f"'{file.path}' is a mixture of experts of an architecture that cannot be unpacked from GGUF: "
            "use the model's own folder"
        )
    return shared_settings(file)


def expert_settings(file: GgufFile) -> Settings:
    settings = shared_settings(file) | expert_sizes(file)
    architecture = file.metadata["general.architecture"]
    if architecture == "qwen2moe":
        settings["shared_expert_intermediate_size"] = file.setting("expert_shared_feed_forward_length")
    # the files do not say whether the weights of a row's experts are scaled to a sum of 1: Qwen3 does, Qwen2 does not
    return settings | {"norm_topk_prob": architecture == "qwen3moe", "decoder_sparse_step": 1, "mlp_only_layers": []}


def expert_sizes(file: GgufFile) -> Settings:
    return {
        "num_experts": file.setting("expert_count"),
        "num_experts_per_tok": file.setting("expert_used_count"),
        "moe_intermediate_size": file.setting("expert_feed_forward_length"),
    }


def _gemma3_settings(file: GgufFile) -> Settings:
    settings = dense_settings(file)
    num_layers, num_heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    # The one size whose attention is not scaled by its head size; llama.cpp also identifies it by its depth.
    wide = num_layers == GEMMA3_27B_LAYERS
    return settings | {
        "sliding_window": file.setting("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if layer % GEMMA3_GLOBAL_EVERY else "full_attention"
            for layer in range(1, num_layers + 1)
        ],
        "query_pre_attn_scalar": settings["hidden_size"] // num_heads if wide else settings["head_dim"],
        "rope_parameters": {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {"rope_theta": GEMMA3_LOCAL_THETA, "rope_type": "default"},
        },
    }


def _as_stored(name: str, values: Array, settings: Settings) -> Array:
    return values


def pairs_to_halves(values: Array, num_heads: int) -> Array:
    """Reorder the rows of a query or key projection from adjacent rotated pairs to rotated halves.

    Row 2i + j of a head becomes row j * (head_dim / 2) + i: from the layout of Meta's and llama.cpp's code to
    that of transformers.
    """
    rows, columns = values.shape[0], values.shape[1:]
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, *columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _restore_llama(name: str, values: Array, settings: Settings) -> Array:
    if ".q_proj." in name:
        return pairs_to_halves(values, settings["num_attention_heads"])
    if ".k_proj." in name:
        return pairs_to_halves(values, settings["num_key_value_heads"])
    return values


def _restore_gemma(name: str, values: Array, settings: Settings) -> Array:
    # GGUF stores the factor of a normalization, transformers the factor minus one.
    return values - np.float32(1) if "norm" in name else values


def shortest_float(value: float) -> float:
    """Return the shortest decimal number of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


ATTENTION_FAMILIES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama_settings, _restore_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", dense_settings, _as_stored),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", expert_settings, _as_stored),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", dense_settings, _as_stored),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", expert_settings, _as_stored),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3_settings, _restore_gemma),
}
