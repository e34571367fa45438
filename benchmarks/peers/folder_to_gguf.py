"""Writes a Llama model folder as a GGUF file of 4 to 8 bits, for measurements beside llama.cpp.

    python folder_to_gguf.py FOLDER q4_k_m FILE.gguf [plain | pure]

Kinds are q8_0, q4_0, q4_1, q5_0, q5_1, q6_k, q4_k_m, q5_k_m, iq4_nl and iq4_xs. `q4_k_m` and `q5_k_m` have the layout
of llama.cpp's: Q6_K for the output head, and for the values and the second projection of the perceptron in half of the
layers, else Q4_K or Q5_K. Rows that are no multiple of 256 get the kinds that llama.cpp gives them. Blocks are those of
llama.cpp's own quantizer, `ggml_quantize_chunk` of the package `xllamacpp`; with `plain`, q4_0 and q4_k_m are rounded
here, without its search. With `pure`, the output head has the kind of the other matrices. Needs the package `gguf`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors import safe_open

Array = np.ndarray[Any, Any]
SUPER = 256
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
MIXED = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K"}
SIMPLE = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q6_k", "iq4_nl", "iq4_xs")


def float16_bytes(values: Array) -> Array:
    return values.astype(np.float16).view(np.uint8).reshape(*values.shape[:-1], -1)


def rounded_ratio(values: Array, units: Array, low: int, high: int) -> Array:
    safe = np.where(units == 0, 1, units)
    return np.clip(np.rint(np.where(units == 0, 0, values / safe)), low, high)


def q4_k(values: Array) -> Array:
    """Blocks of 144 bytes: two float16, 12 bytes of 6-bit scales and minimums, 128 bytes of codes."""
    x = values.reshape(-1, 8, 32).astype(np.float32)
    low = np.minimum(x.min(-1), 0)
    scale, minimum = (np.maximum(x.max(-1), 0) - low) / 15, -low
    units = np.stack([scale.max(-1), minimum.max(-1)], -1) / 63
    units = units.astype(np.float16).astype(np.float32)
    scales = rounded_ratio(scale, units[:, :1], 0, 63).astype(np.uint8)
    minimums = rounded_ratio(minimum, units[:, 1:], 0, 63).astype(np.uint8)
    own, floor = units[:, :1] * scales, units[:, 1:] * minimums
    codes = rounded_ratio(x + floor[..., None], own[..., None], 0, 15).astype(np.uint8)
    packed = np.empty((len(x), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    packed[:, 8:] = (scales[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4
    pairs = codes.reshape(-1, 4, 2, 32)
    return np.concatenate(
        [float16_bytes(units), packed, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(x), 128)], -1
    ).reshape(values.shape[0], -1)


def q6_k(values: Array) -> Array:
    """Blocks of 210 bytes: 128 of low bits, 64 of high bits, 16 signed scales, a float16."""
    x = values.reshape(-1, 16, 16).astype(np.float32)
    at = np.abs(x).argmax(-1)[..., None]
    scale = np.take_along_axis(x, at, -1)[..., 0] / -32
    unit = (np.abs(scale).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scales = rounded_ratio(scale, unit, -127, 127).astype(np.int8)
    codes = (rounded_ratio(x, (unit * scales)[..., None], -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    lows = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], -1)
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [lows.reshape(-1, 128), highs.reshape(-1, 64), scales.view(np.uint8), float16_bytes(unit)]
    return np.concatenate(parts, -1).reshape(values.shape[0], -1)


@functools.cache
def ggml() -> Any:
    """The library of llama.cpp, inside the module of its bindings."""
    from xllamacpp import xllamacpp

    library = ctypes.CDLL(xllamacpp.__file__)
    numbers = (ctypes.c_int64,) * 3
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *numbers, ctypes.c_void_p]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def by_ggml(values: Array, kind: GGMLQuantizationType) -> Array:
    """Blocks of llama.cpp's quantizer, without an importance matrix."""
    block, size = GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    source = np.ascontiguousarray(values, np.float32)
    found = np.empty((rows, columns // block * size), np.uint8)
    written = ggml().ggml_quantize_chunk(int(kind), source.ctypes.data, found.ctypes.data, 0, rows, columns, None)
    if written != found.nbytes:
        raise SystemExit(f"llama.cpp wrote {written} bytes of {kind.name}, not {found.nbytes}")
    return found


def packed(values: Array, kind: str, *, is_plain: bool) -> tuple[Array, GGMLQuantizationType]:
    if kind in FALLBACKS and values.shape[-1] % SUPER:
        kind = FALLBACKS[kind]
    wanted = GGMLQuantizationType[kind]
    if not is_plain:
        return by_ggml(values, wanted), wanted
    found = {"Q4_K": q4_k, "Q6_K": q6_k}.get(kind)
    return (quantize(values, wanted) if found is None else found(values)), wanted


def kind_of(name: str, layers: int, wanted: str, *, is_pure: bool) -> str:
    """The kind of a matrix, about as llama.cpp chooses it."""
    parts = name.split(".")
    is_head = name in ("token_embd.weight", "output.weight")
    if is_pure:
        return MIXED.get(wanted, wanted.upper())
    if wanted in SIMPLE:
        return "Q8_0" if is_head and wanted in ("q8_0", "q4_0", "q4_1") else "Q6_K" if is_head else wanted.upper()
    if is_head:
        return "Q6_K"
    layer, eighth = int(parts[1]), layers // 8
    has_more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return "Q6_K" if has_more and parts[2] in ("attn_v", "ffn_down") else MIXED[wanted]


def in_pairs(values: Array, heads: int) -> Array:
    """Rows of rotated halves in the order of rotated pairs."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def add_settings(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: GGUFWriter, folder: Path, size: int) -> None:
    found = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab: dict[str, int] = found["model"]["vocab"]
    special = {token["id"]: token["content"] for token in found["added_tokens"]}
    by_id = {index: token for token, index in vocab.items()} | special
    pieces = [by_id.get(index, f"<spare{index}>") for index in range(size)]
    is_bytes = "<0x00>" in vocab
    types = [
        3 if index in special else 6 if is_bytes and piece.startswith("<0x") else 1
        for index, piece in enumerate(pieces)
    ]
    writer.add_tokenizer_model("llama" if is_bytes else "gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    if is_bytes:
        writer.add_token_scores([0.0 if index < 259 else -float(index) for index in range(size)])
    else:
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in found["model"]["merges"]])
    settings = json.loads((folder / "generation_config.json").read_text("utf-8"))
    end = settings.get("eos_token_id", 2)
    writer.add_bos_token_id(int(settings.get("bos_token_id", 1)))
    writer.add_eos_token_id(int(end[0] if isinstance(end, list) else end))


def main(source: str, wanted: str, target: str, rounding: str = "llama.cpp") -> None:
    """Write all matrices in the kind, and all vectors in float32."""
    if wanted not in (*SIMPLE, *MIXED) or rounding not in ("llama.cpp", "plain", "pure"):
        raise SystemExit(f"kinds are {', '.join((*SIMPLE, *MIXED))}; after the file may follow: plain or pure")
    folder = Path(source)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    writer = GGUFWriter(target, "llama")
    add_settings(writer, config)
    add_tokenizer(writer, folder, config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no dictionary
                values = file.get_tensor(key).to(torch.float32).numpy()
                own = next((count for word, count in heads.items() if word in key), None)
                values = values if own is None else np.ascontiguousarray(in_pairs(values, own))
                if values.ndim == 1:
                    writer.add_tensor(gguf_name(key), values)
                    continue
                name = gguf_name(key)
                own_kind = kind_of(name, config["num_hidden_layers"], wanted, is_pure=rounding == "pure")
                data, kind = packed(values, own_kind, is_plain=rounding == "plain")
                writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
