"""Writes a safetensors file tensor by tensor, and checks that one is whole without reading its values.

Source: the safetensors format (a length of 8 bytes, a JSON header, then the raw values). Writing as a stream keeps one
unpacked tensor in memory instead of the whole model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from draftree.core.errors import ModelLoadError
from draftree.models.weights.gguf_file import Dtype

if TYPE_CHECKING:
    import torch

__all__ = ["check_safetensors", "write_safetensors"]

CODES: dict[Dtype, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
MAX_HEADER_BYTES = 100_000_000


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: Dtype,
) -> None:
    """Writes the named tensors, cast to `dtype`; `tensors` yields each name of `shapes` once, in the same order."""
    import torch

    code, item_bytes = CODES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * item_bytes
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    expected = iter(shapes.items())
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name, tensor in tensors:
            assert (name, tuple(tensor.shape)) == next(expected), name
            values = tensor.to(getattr(torch, dtype)).contiguous()
            stream.write(values.view(torch.uint8).numpy().data)
    assert next(expected, None) is None


def check_safetensors(path: Path) -> None:
    """Checks header and length of a safetensors file.

    Raises:
        ModelLoadError: The header is damaged, or the file does not end where the header says.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        num_header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or num_header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise damaged(path, f"its header can not be read ({size} bytes)")
        try:
            header = json.loads(stream.read(num_header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise damaged(path, "its header can not be read") from None
    expected = 8 + num_header_bytes + max(ends, default=0)
    if size != expected:
        raise damaged(path, f"it has {size} bytes, and its header says {expected}")


def damaged(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"the weights file '{path}' is damaged: {why}; get the model again")
