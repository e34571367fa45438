"""Writes a random model of Llama shape as a GGUF file, for measurements of speed alone.

    python random_gguf.py TOKENIZER-FOLDER q4_0|q4_k_m FILE.gguf [HIDDEN LAYERS HEADS KV-HEADS MLP]

The default shape has 3 billion weights. `TOKENIZER-FOLDER` is a model folder with a tokenizer of at most 32,000 tokens.
All matrices of one shape and kind are the same random numbers. Needs the packages `gguf` and `xllamacpp`.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from folder_to_gguf import add_settings, add_tokenizer, kind_of, packed
from gguf import GGUFWriter

VOCAB = 32000
SHAPE = (3072, 28, 24, 8, 8192)


@functools.cache
def matrix(outputs: int, inputs: int, kind: str) -> Any:
    """Blocks of a random matrix and their kind; a quarter of its rows is repeated."""
    part = np.random.default_rng(0).standard_normal((outputs // 4, inputs), np.float32) / np.sqrt(inputs)
    data, found = packed(part, kind, is_plain=False)
    return np.tile(data, (4, 1)), found


def main(folder: str, wanted: str, target: str, *shape: str) -> None:
    """Write all layers, a head and an embedding."""
    hidden, layers, heads, kv_heads, mlp = tuple(map(int, shape)) or SHAPE
    config = {
        "max_position_embeddings": 8192,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0},
        "vocab_size": VOCAB,
    }
    writer = GGUFWriter(target, "llama")
    add_settings(writer, config)
    add_tokenizer(writer, Path(folder), VOCAB)
    narrow = hidden // heads * kv_heads
    sizes = {"attn_q": (hidden, hidden), "attn_k": (narrow, hidden), "attn_v": (narrow, hidden)}
    sizes |= {"attn_output": (hidden, hidden), "ffn_gate": (mlp, hidden), "ffn_up": (mlp, hidden)}
    sizes |= {"ffn_down": (hidden, mlp)}
    names = {"token_embd.weight": (VOCAB, hidden), "output.weight": (VOCAB, hidden)}
    names |= {f"blk.{layer}.{name}.weight": size for layer in range(layers) for name, size in sizes.items()}
    for name, size in names.items():
        data, kind = matrix(*size, kind_of(name, layers, wanted, is_pure=False))
        writer.add_tensor(name, data, raw_dtype=kind)
    norms = [f"blk.{layer}.{name}.weight" for layer in range(layers) for name in ("attn_norm", "ffn_norm")]
    for name in ("output_norm.weight", *norms):
        writer.add_tensor(name, np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
