"""Streaming writer of safetensors files, and a check of completeness that reads no values.

Source: the safetensors format (a length of 8 bytes, a JSON header, then the raw values). Writing as a stream keeps one
unpacked tensor in memory instead of the whole model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from draftree.core.errors import ModelLoadError
from draftree.core.files import get_again
from draftree.weights.cache import Progress
from draftree.weights.gguf_file import Dtype

CODES: dict[Dtype, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
MAX_QUOTED = 200


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    *,
    dtype: Dtype,
    progress: Progress,
) -> None:
    """Write the named tensors, cast to `dtype`; `read` returns the float32 values of each name in turn."""
    import torch

    code, item_bytes = CODES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * item_bytes
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done_bytes = 0
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name, shape in shapes.items():
            values = np.require(read(name), requirements=["C", "W"])
            assert values.shape == shape, name
            raw = torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint8).numpy().data
            stream.write(raw)
            done_bytes += raw.nbytes
            progress("convert", done_bytes, end)


def check_safetensors(path: Path) -> tuple[int, int]:
    """Check header and length of a safetensors file, whose values are not read.

    Returns the number of its tensors and an upper bound for the number of their values.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            num_tensors = len(file.keys())
    except SafetensorError as error:
        why = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:MAX_QUOTED])
        raise ModelLoadError(f"the weights file '{path}' is damaged: {why}; {get_again(path.parent)}") from error
    return num_tensors, 2 * path.stat().st_size  # two values of 4 bits fit into a byte
