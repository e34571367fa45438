"""Conversion of a llama2.c checkpoint with its tokenizer to a plain model folder.

Source: the format of llama2.c's `run.c` (version 0): seven integers, then float32 tensors in a fixed order, each kind
stacked over the layers. Here the tokenizer file follows the checkpoint in the same file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftree.core.errors import ModelLoadError
from draftree.weights.cache import Progress
from draftree.weights.convert_gguf import pairs_to_halves
from draftree.weights.folders import parameter_shapes, save_configuration
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

LAYER_TENSORS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "wq",
    "self_attn.k_proj": "wk",
    "self_attn.v_proj": "wv",
    "self_attn.o_proj": "wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "w1",
    "mlp.down_proj": "w2",
    "mlp.up_proj": "w3",
}
"""Modules of a layer of transformers, and the tensors of `run.c`."""


@dataclass(frozen=True, slots=True)
class Llama2cHeader:
    """The seven integers at the beginning; a negative vocabulary size means a separate output matrix."""

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int
    shares_output: bool = field(kw_only=True)

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        layers, dim, hidden = self.num_layers, self.dim, self.hidden_dim
        kv_dim = self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "token_embedding": (self.vocab_size, dim),
            "attention_norm": (layers, dim),
            "wq": (layers, dim, dim),
            "wk": (layers, kv_dim, dim),
            "wv": (layers, kv_dim, dim),
            "wo": (layers, dim, dim),
            "ffn_norm": (layers, dim),
            "w1": (layers, hidden, dim),
            "w2": (layers, dim, hidden),
            "w3": (layers, hidden, dim),
            "final_norm": (dim,),
            "rope_cosines": (self.context_length, self.head_dim // 2),
            "rope_sines": (self.context_length, self.head_dim // 2),
        }
        return shapes if self.shares_output else shapes | {"output": (self.vocab_size, dim)}


def convert_llama2c(source: Path, folder: Path, *, progress: Progress) -> None:
    """Write configuration, float32 weights and tokenizer of a checkpoint and its tokenizer into the empty `folder`."""
    content = source.read_bytes()
    header = read_header(source, content)
    tensors, end = read_tensors(source, content, header)
    pieces, scores = read_tokenizer(source, content[end:], header.vocab_size)
    tokenizer = sentencepiece_tokenizer(
        pieces, [-score for score in scores], starts_with_space=True, unknown=pieces[UNKNOWN]
    )
    roles = {"unk_token": UNKNOWN, "bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    settings = TokenizerSettings(roles=roles, adds_bos=True, context_length=header.context_length)
    save_tokenizer(tokenizer, pieces, settings, folder=folder)
    config = save_configuration(
        folder,
        model_type="llama",
        model_class="LlamaForCausalLM",
        settings={
            "vocab_size": header.vocab_size,
            "hidden_size": header.dim,
            "intermediate_size": header.hidden_dim,
            "num_hidden_layers": header.num_layers,
            "num_attention_heads": header.num_heads,
            "num_key_value_heads": header.num_kv_heads,
            "head_dim": header.head_dim,
            "max_position_embeddings": header.context_length,
            "rms_norm_eps": RMS_NORM_EPS,
            "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
            "tie_word_embeddings": header.shares_output,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
        },
        dtype="float32",
        # These models were trained with bos between the texts and without eos: bos ends a text.
        stop_ids=(BOS, EOS),
    )
    named = parameters(header, tensors)
    write_safetensors(
        folder / "model.safetensors",
        parameter_shapes(config),
        named.__getitem__,
        dtype="float32",
        progress=progress,
    )


def read_header(source: Path, content: bytes) -> Llama2cHeader:
    if len(content) < HEADER.size:
        raise broken(source, f"it has {len(content)} bytes")
    dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab_size, context = HEADER.unpack_from(content)
    sizes = [dim, hidden_dim, num_layers, num_heads, num_kv_heads, abs(vocab_size), context]
    if min(sizes) <= 0 or dim % num_heads or num_heads % num_kv_heads:
        raise broken(source, f"its sizes {sizes} do not describe a model")
    return Llama2cHeader(*sizes, shares_output=vocab_size > 0)


def read_tensors(source: Path, content: bytes, header: Llama2cHeader) -> tuple[dict[str, Array], int]:
    """Return the stacked tensors as views of the content, and the position after them."""
    tensors: dict[str, Array] = {}
    position = HEADER.size
    for name, shape in header.shapes().items():
        count = int(np.prod(shape))
        if position + 4 * count > len(content):
            raise broken(source, f"it ends within the tensor '{name}'")
        tensors[name] = np.frombuffer(content, np.dtype("<f4"), count, position).reshape(shape)
        position += 4 * count
    return tensors, position


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


def parameters(header: Llama2cHeader, tensors: dict[str, Array]) -> dict[str, Array]:
    """Return the tensors under their transformers names, in its layout of rotated heads."""
    named = {"model.embed_tokens.weight": tensors["token_embedding"], "model.norm.weight": tensors["final_norm"]}
    if not header.shares_output:
        named["lm_head.weight"] = tensors["output"]
    heads = {"wq": header.num_heads, "wk": header.num_kv_heads}
    for layer in range(header.num_layers):
        for module, tensor in LAYER_TENSORS.items():
            values = tensors[tensor][layer]
            values = pairs_to_halves(values, heads[tensor]) if tensor in heads else values
            named[f"model.layers.{layer}.{module}.weight"] = values
    return named


def broken(source: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"'{source}' is not a llama2.c checkpoint with its tokenizer: {why}")
