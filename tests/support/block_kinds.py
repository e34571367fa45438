"""Random weights in the blocks of GGUF files. Not a test itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from draftree.models.native.blueprint import SILU, Blueprint, LinearBlueprint
from draftree.models.native.library import RowBlocks
from draftree.models.native.weights import Weights

SCALES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
"""Places of the float16 numbers of a block; the first bytes of other kinds."""


def size_of_scales(kind: str) -> float:
    """Scales of blocks of 256 are multiplied with numbers up to 63 or 127; some are subnormal."""
    return 2e-4 if GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 256 else 0.02


def random_rows(kind: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Bytes of rows: any codes, scales of a usual size."""
    chance = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = chance.integers(0, 256, (outputs * inputs // values, size), dtype=np.uint8)
    for place in SCALES.get(kind, (0,)):
        scales = (size_of_scales(kind) * chance.uniform(0.1, 1, len(blocks))).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(outputs, -1)


def values_of(kind: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return dequantize(rows, GGMLQuantizationType[kind])


def row_blocks(kind: str, rows: np.ndarray[Any, Any]) -> RowBlocks:
    return RowBlocks(kind, torch.from_numpy(rows), torch.arange(len(rows)))


def write_in_blocks(source: Path, target: Path, kind_of: Callable[[str], str]) -> None:
    """Copy a GGUF file; a matrix becomes blocks of the kind of its name: its own numbers, or random ones if no
    quantization to that kind is known."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for number, tensor in enumerate(reader.tensors):
        if tensor.data.ndim == 1 or "ffn_gate_inp" in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        kind = GGMLQuantizationType[kind_of(tensor.name)]
        try:
            rows = quantize(tensor.data, kind)
        except NotImplementedError:
            *outer, inner = tensor.data.shape
            rows = random_rows(kind.name, math.prod(outer), inner, seed=number).reshape(*outer, -1)
        writer.add_tensor(tensor.name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class HeadWeights(Weights):
    """Weights of a decoder without layers: a norm of ones, and an embedding that is also the head."""

    def __init__(self, hidden: int, head: RowBlocks | torch.Tensor) -> None:
        self._hidden, self._head = hidden, head

    def get(self, name: str) -> torch.Tensor:
        if name == "norm":
            return torch.ones(self._hidden)
        assert isinstance(self._head, torch.Tensor), "it has blocks"
        return self._head

    def blocks(self, name: str) -> RowBlocks | None:
        return self._head if name == "head" and isinstance(self._head, RowBlocks) else None

    def release(self, name: str) -> None:
        pass


def head_alone(hidden: int, vocab: int) -> Blueprint:
    """A decoder without layers: its logits are the product of normed inputs and the head."""
    sizes = {"hidden": hidden, "heads": 1, "kv_heads": 1, "head_dim": 16, "mlp": 32, "vocab": vocab}
    return Blueprint(
        kind="head",
        fingerprint="",
        context=64,
        dtype="float32",
        activation=SILU,
        epsilon=0.0,
        norm_offset=0.0,
        embedding_scale=1.0,
        residual_scale=1.0,
        logit_scale=1.0,
        embedding="head",
        final_norm="norm",
        head=LinearBlueprint("head", None, hidden, vocab),
        ropes=(),
        layers=(),
        **sizes,
    )


def rounded_inputs(rows: torch.Tensor) -> torch.Tensor:
    """Rows after a norm of ones, rounded to 8 bits with a scale for 32 numbers, float64."""
    normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True))).double()
    groups = torch.nn.functional.pad(normed, (0, -rows.shape[1] % 32)).view(len(rows), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale).round() * scale).flatten(1)[:, : rows.shape[1]]
