"""Tiny model files in the published forms."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from draftree.weights.catalogue import CatalogueEntry, Package

LETTERS = "abcdefghijklmnopqrstuvwxyz.,!"
MERGED = ["▁t", "he", "▁the", "▁a", "an", "▁an", "nd", "▁and", "▁▁", "er", "in", "▁in", "on"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *MERGED, "▁", *LETTERS]
SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) - 259)]


def tokenizer_bin() -> bytes:
    """`PIECES` as llama2.c spells them."""
    spelled = [
        "<unk>",
        "\n<s>\n",
        "\n</s>\n",
        *map(chr, range(256)),
        *(piece.replace("▁", " ") for piece in PIECES[259:]),
    ]
    parts = [struct.pack("<i", 8)]
    for piece, score in zip(spelled, SCORES, strict=True):
        raw = piece.encode()
        parts.append(struct.pack("<fi", score, len(raw)) + raw)
    return b"".join(parts)


def llama2c_tensors(seed: int, *, dim: int, hidden: int, layers: int, kv_dim: int) -> dict[str, np.ndarray[Any, Any]]:
    """Random tensors of a llama2.c checkpoint in file order, without the rotation tables."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embedding": (len(PIECES), dim),
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
    }
    return {name: rng.normal(0.0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def llama2c_file(*, seed: int = 0, dim: int = 24, hidden: int = 40, layers: int = 2, heads: int = 2, kv_heads: int = 1,
                 context: int = 32) -> bytes:  # fmt: skip
    """A llama2.c checkpoint followed by its tokenizer."""
    tensors = llama2c_tensors(seed, dim=dim, hidden=hidden, layers=layers, kv_dim=dim // heads * kv_heads)
    header = struct.pack("<7i", dim, hidden, layers, heads, kv_heads, len(PIECES), context)
    rotations = np.zeros((2, context, dim // heads // 2), np.float32)
    return header + b"".join(values.tobytes() for values in [*tensors.values(), rotations]) + tokenizer_bin()


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    *,
    tokenizer_model: str = "llama",
    byte_level: str | None = None,
    markers: Sequence[str] = (),
    **keys: Any,
) -> None:
    """Writes a transformers model as GGUF, in the layouts that llama.cpp's converter gives.

    Its vocabulary is `PIECES`, or with `byte_level` as many byte-level pieces, cut by the rule of that name; `markers`
    are control pieces of the latter, and the first of them is the end of a text.
    """
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if byte_level is None:
        add_sentencepiece(writer, tokenizer_model)
    else:
        add_byte_level(writer, byte_level, markers or ["<|end|>"])
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(*value if isinstance(value, tuple) else (value,))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = halves_to_pairs(values, values.shape[0] // config.head_dim)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        if ".experts." in name:
            layer = name.split(".")[2]
            parts = [("down", values)] if "down" in name else zip(("gate", "up"), np.split(values, 2, 1), strict=True)
            for part, own in parts:
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(own))
            continue
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sentencepiece(writer: gguf.GGUFWriter, model: str) -> None:
    writer.add_tokenizer_model(model)
    writer.add_token_list(PIECES)
    writer.add_token_scores(SCORES)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def add_byte_level(writer: gguf.GGUFWriter, cutting: str, markers: Sequence[str], size: int = len(PIECES)) -> None:
    merges = ["1 2", "a b", "Ġ 1"]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), *markers]
    controls = len(PIECES) - 259
    pieces += [f"<|spare{index}|>" for index in range(size - len(pieces))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cutting)
    writer.add_token_list(pieces)
    writer.add_token_merges(merges)
    writer.add_token_types([1] * 259 + [3] * controls + [1] * (size - 259 - controls))
    writer.add_eos_token_id(259)


def halves_to_pairs(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row j * half + i of each head becomes row 2i + j, one row at a time."""
    size = values.shape[0] // heads
    rows = [head * size + j * (size // 2) + i for head in range(heads) for i in range(size // 2) for j in range(2)]
    return values[rows]


def random_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model with every parameter random, norms included, so that no two of them can be mistaken for each other."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def sample_entry(
    registry: str, source: bytes, *, name: str = "sample", parts: int = 1, **changes: Any
) -> CatalogueEntry:
    """A catalogue entry for `source`, published in that many packages."""
    package_type: Any = registry
    packages = tuple(
        Package(package_type, f"draftree-sample-{name}-{part}", "1.0.0", member(registry, name, part), 10_000)
        for part in range(parts)
    )
    fields: dict[str, Any] = {
        "name": name,
        "description": "a sample",
        "licence": "MIT",
        "num_parameters": 1,
        "vocab_size": len(PIECES),
        "context_length": 32,
        "dtype": "float32",
        "form": "llama2c",
        "packages": packages,
        "sha256": hashlib.sha256(source).hexdigest(),
        "source_bytes": len(source),
        "folder_bytes": 100_000,
    }
    return CatalogueEntry(**(fields | changes))


def member(registry: str, name: str, part: int) -> str:
    return "package/model.part" if registry == "npm" else f"draftree_sample_{name}_{part}/model.part"
