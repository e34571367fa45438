"""Streaming writer of safetensors files, and a check of completeness that reads no values.

Source: the safetensors format (a length of 8 bytes, a JSON header, then the raw values). Writing as a stream keeps one
unpacked tensor in memory instead of the whole model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftree.core.errors import ModelLoadError
from draftree.core.files import JsonError, get_again, parse_json_object
from draftree.weights.gguf_file import Dtype

if TYPE_CHECKING:
    import torch

CODES: dict[Dtype, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits per value, by the format's names of types."""
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: Dtype,
) -> None:
    """Write the named tensors, cast to `dtype`; `tensors` yields each name of `shapes` once, in the same order."""
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


def check_safetensors(path: Path) -> tuple[int, int]:
    """Check header and length of a safetensors file: the tensors are contiguous and fill the file.

    Returns their number and an upper bound for the number of their values.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or num_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise damaged(path, f"its header cannot be read ({size} bytes)")
        try:
            header = parse_json_object(stream.read(num_bytes))
        except JsonError:
            raise damaged(path, "its header cannot be read") from None
    start = 8 + num_bytes
    places = sorted(place_of(path, name, entry) for name, entry in header.items() if name != "__metadata__")
    end = 0
    for begin, stop, name in places:
        if begin != end:
            raise damaged(path, f"the values of '{name[:80]}' begin at {begin}, and those before it end at {end}")
        end = stop
    if size != start + end:
        raise damaged(path, f"it has {size} bytes, and its header implies {start + end}")
    return len(places), 2 * end  # two values of 4 bits fit into a byte


def place_of(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    """Return where the values of a tensor begin and end, relative to the end of the header."""
    shown = name[:80]
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise damaged(path, f"its header does not describe '{shown}'") from None
    if not isinstance(kind, str) or kind not in BITS:
        raise damaged(path, f"'{shown}' has the unknown type {str(kind)[:40]!r}")
    sizes = (*shape, begin, end) if isinstance(shape, list) else ("",)
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 63 for size in sizes):
        raise damaged(path, f"shape or place of '{shown}' is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise damaged(path, f"'{shown}' has {len(shape)} dimensions, of {MAX_DIMENSIONS} at most")
    if 8 * (end - begin) != math.prod(shape) * BITS[kind]:
        raise damaged(path, f"'{shown}' of shape {str(shape)[:80]} and type {kind} does not take {end - begin} bytes")
    return begin, end, name


def damaged(path: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"the weights file '{path}' is damaged: {why}; {get_again(path.parent)}")
