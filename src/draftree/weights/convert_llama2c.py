"""Conversion of a llama2.c checkpoint with its tokenizer to a plain model folder.

Source: the format of llama2.c's `run.c` (version 0): seven integers, then float32 tensors in a fixed order, each kind
stacked over the layers. Here the tokenizer file follows the checkpoint in the same file.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from draftree.core.errors import ModelLoadError
from draftree.weights.cache import Progress
from draftree.weights.folders import parameter_shapes, save_configuration
from draftree.weights.gguf_families import pairs_to_halves
from draftree.weights.safetensors_file import write_safetensors
from draftree.weights.tokenizers_from_pieces import (
    WORD_START,
    TokenizerSettings,
    save_tokenizer,
    sentencepiece_tokenizer,
)

LLAMA2C_CONVERTER = "llama2c-1"  # changes whenever the same file would convert to a different folder

HEADER = struct.Struct("<7i")
UNKNOWN, BOS, EOS = 0, 1, 2
FIRST_BYTE_PIECE, NUM_BYTE_PIECES = 3, 256
RMS_NORM_EPS = 1e-5
ROPE_THETA = 10_000.0

Array = np.ndarray[Any, np.dtype[np.float32]]


def convert_llama2c(source: Path, folder: Path, *, progress: Progress) -> None:
    """Write configuration, float32 weights and tokenizer of a checkpoint and its tokenizer into the empty `folder`."""
    content = source.read_bytes()
    settings = read_header(source, content)
    weights, end = read_weights(source, content, settings)
    pieces, scores = read_tokenizer(source, content[end:], settings["vocab_size"])
    tokenizer = sentencepiece_tokenizer(
        pieces, [-score for score in scores], starts_with_space=True, unknown=pieces[UNKNOWN]
    )
    roles = {"unk_token": UNKNOWN, "bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    of_tokenizer = TokenizerSettings(roles=roles, adds_bos=True, context_length=settings["max_position_embeddings"])
    save_tokenizer(tokenizer, pieces, of_tokenizer, folder=folder)
    config = save_configuration(
        folder,
        model_type="llama",
        model_class="LlamaForCausalLM",
        settings=settings,
        dtype="float32",
        # These models were trained with bos between the texts and without eos: bos ends a text.
        stop_ids=(BOS, EOS),
    )
    shapes = parameter_shapes(config)
    write_safetensors(folder / "model.safetensors", shapes, weights.__getitem__, dtype="float32", progress=progress)


def read_header(source: Path, content: bytes) -> dict[str, Any]:
    """Return the settings of the model; a negative vocabulary size means a separate output matrix."""
    if len(content) < HEADER.size:
        raise broken(source, f"it has {len(content)} bytes")
    dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab_size, context_length = HEADER.unpack_from(content)
    sizes = [dim, hidden_dim, num_layers, num_heads, num_kv_heads, abs(vocab_size), context_length]
    if min(sizes) <= 0 or dim % num_heads or num_heads % num_kv_heads:
        raise broken(source, f"its sizes {sizes} do not describe a model")
    return {
        "vocab_size": abs(vocab_size),
        "hidden_size": dim,
        "intermediate_size": hidden_dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": dim // num_heads,
        "max_position_embeddings": context_length,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "tie_word_embeddings": vocab_size > 0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }


def read_weights(source: Path, content: bytes, settings: dict[str, Any]) -> tuple[dict[str, Array], int]:
    """Return the tensors by their transformers names, in its layout of rotated heads, and the position after them."""
    layers = settings["num_hidden_layers"]
    dim = settings["hidden_size"]
    hidden = settings["intermediate_size"]
    kv_dim = settings["num_key_value_heads"] * settings["head_dim"]
    embedding = (settings["vocab_size"], dim)
    rope = (settings["max_position_embeddings"], settings["head_dim"] // 2)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": embedding,
        "input_layernorm": (layers, dim),
        "self_attn.q_proj": (layers, dim, dim),
        "self_attn.k_proj": (layers, kv_dim, dim),
        "self_attn.v_proj": (layers, kv_dim, dim),
        "self_attn.o_proj": (layers, dim, dim),
        "post_attention_layernorm": (layers, dim),
        "mlp.gate_proj": (layers, hidden, dim),
        "mlp.down_proj": (layers, dim, hidden),
        "mlp.up_proj": (layers, hidden, dim),
        "model.norm": (dim,),
        "cosines": rope,
        "sines": rope,
    }
    if not settings["tie_word_embeddings"]:
        shapes["lm_head"] = embedding
    num_heads = {
        "self_attn.q_proj": settings["num_attention_heads"],
        "self_attn.k_proj": settings["num_key_value_heads"],
    }
    weights: dict[str, Array] = {}
    position = HEADER.size
    for name, shape in shapes.items():
        count = math.prod(shape)
        if position + 4 * count > len(content):
            raise broken(source, f"it ends within the tensor '{name}'")
        values = np.frombuffer(content, np.dtype("<f4"), count, position).reshape(shape)
        position += 4 * count
        if name.startswith(("input", "self", "post", "mlp")):  # stacked over the layers
            for layer, rows in enumerate(values):
                rows = pairs_to_halves(rows, num_heads[name]) if name in num_heads else rows
                weights[f"model.layers.{layer}.{name}.weight"] = rows
        else:
            weights[f"{name}.weight"] = values
    return weights, position


def read_tokenizer(source: Path, content: bytes, vocab_size: int) -> tuple[list[str], list[float]]:
    """Read pieces and scores; byte pieces spelled as characters and word starts spelled as spaces are converted."""
    pieces: list[str] = []
    scores: list[float] = []
    position = 4
    for index in range(vocab_size):
        if position + 8 > len(content):
            raise broken(source, f"its tokenizer ends at piece {index} of {vocab_size}")
        score, length = struct.unpack_from("<fi", content, position)
        position += 8
        spelled = content[position : position + length].decode("utf-8", errors="replace")
        position += length
        scores.append(score)
        if index in (BOS, EOS):
            pieces.append(spelled.strip())
        elif FIRST_BYTE_PIECE <= index < FIRST_BYTE_PIECE + NUM_BYTE_PIECES:
            pieces.append(f"<0x{index - FIRST_BYTE_PIECE:02X}>")
        else:
            pieces.append(spelled.replace(" ", WORD_START))
    return pieces, scores


def broken(source: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"'{source}' is not a llama2.c checkpoint with its tokenizer: {why}")
