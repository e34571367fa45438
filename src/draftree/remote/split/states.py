"""Hidden states on the way: one row of bytes per token, in float32, bfloat16 or int8 with a scale per row.

A row's bytes depend on that row only, so a text does not depend on drafts in any of the formats.

| format | bytes per row | values |
| --- | --- | --- |
| float32 | 4 * hidden | exact |
| bfloat16 | 2 * hidden | rounded to nearest even; exact if the residual stream is bfloat16 |
| int8 | 52 + hidden | the 8 largest values as they are; the others in steps of their largest size / 127 |

A few values of a residual stream are many times as large as all others, which would have no bits left with one scale.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import GenerationError
from draftree.remote.errors import FrameError

__all__ = ["StateFormat"]

MOST = 127
NUM_LARGEST = 8
"""Values of an int8 row that are not rounded."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
SCALE, LARGEST, PLACES = slice(0, 4), slice(4, 4 + 4 * NUM_LARGEST), slice(4 + 4 * NUM_LARGEST, 4 + 6 * NUM_LARGEST)
"""Bytes of an int8 row before its values: the scale, the largest values, and their places."""
HEAD_BYTES = PLACES.stop


@final
class StateFormat:
    """A format of hidden states.

    Args:
        kind: "float32", "bfloat16" or "int8".
        hidden: values per row.
    """

    def __init__(self, kind: str, hidden: int) -> None:
        self.kind, self.hidden = kind, hidden
        self.row_bytes = (HEAD_BYTES if kind == "int8" else 0) + VALUE_BYTES[kind] * hidden

    def pack(self, states: Tensor) -> np.ndarray:
        """Return rows as bytes.

        Args:
            states: shape (rows, hidden), any floating dtype.

        Returns:
            Shape (rows, row_bytes), uint8.

        Raises:
            GenerationError: a value is not finite.
        """
        values = states.detach().to("cpu", torch.float32).contiguous()
        if not bool(values.isfinite().all()):
            raise GenerationError("the first layers gave hidden states that are not finite: the server cannot use them")
        if self.kind == "float32":
            found = values.numpy().astype("<f4", copy=False)
        elif self.kind == "bfloat16":
            found = values.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False)
        else:
            return self._pack_int8(values.numpy())
        return np.ascontiguousarray(found).view(np.uint8).reshape(len(found), self.row_bytes)

    def _pack_int8(self, values: np.ndarray) -> np.ndarray:
        found = np.zeros((len(values), self.row_bytes), dtype=np.uint8)
        count = min(NUM_LARGEST, self.hidden)
        places = np.argsort(-np.abs(values), axis=1, kind="stable")[:, :count]
        largest, others = np.take_along_axis(values, places, axis=1), values.copy()
        np.put_along_axis(others, places, 0, axis=1)
        scales = (np.abs(others).max(axis=1, keepdims=True) / np.float32(MOST)).astype("<f4")
        divisors = np.where(scales > 0, scales, np.float32(1))
        found[:, SCALE] = scales.view(np.uint8)
        found[:, LARGEST][:, : 4 * count] = np.ascontiguousarray(largest.astype("<f4")).view(np.uint8)
        found[:, PLACES][:, : 2 * count] = np.ascontiguousarray(places.astype("<u2")).view(np.uint8)
        found[:, HEAD_BYTES:] = np.clip(np.rint(others / divisors), -MOST, MOST).astype(np.int8).view(np.uint8)
        return found

    def _unpack_int8(self, content: np.ndarray) -> np.ndarray:
        count = min(NUM_LARGEST, self.hidden)

        def part(where: slice, kind: str, size: int) -> np.ndarray:
            return np.ascontiguousarray(content[:, where][:, : size * count]).view(kind)

        places = part(PLACES, "<u2", 2).astype(np.int64)
        if (places >= self.hidden).any():
            raise FrameError(f"a row of states has a place beyond its {self.hidden} values", code="bad_states")
        scales = np.ascontiguousarray(content[:, SCALE]).view("<f4").astype(np.float32)
        if not np.isfinite(scales).all():
            raise FrameError("the hidden states have values that are not finite", code="bad_states")
        with np.errstate(over="ignore"):
            found = np.ascontiguousarray(content[:, HEAD_BYTES:]).view(np.int8).astype(np.float32) * scales
        np.put_along_axis(found, places, part(LARGEST, "<f4", 4).astype(np.float32), axis=1)
        return found

    def unpack(self, data: bytes, rows: int) -> Tensor:
        """Return the states of rows from the other side, shape (rows, hidden), float32.

        Raises:
            FrameError: another size, or a value that is not finite.
        """
        if len(data) != rows * self.row_bytes:
            raise FrameError(
                f"{rows} rows of {self.hidden} states in {self.kind} have {rows * self.row_bytes} bytes, and "
                f"{len(data)} were sent",
                code="bad_states",
            )
        content = np.frombuffer(data, dtype=np.uint8).reshape(rows, self.row_bytes)
        if self.kind == "float32":
            found = torch.from_numpy(content.view("<f4").astype(np.float32))
        elif self.kind == "bfloat16":
            found = torch.from_numpy(content.view("<i2").astype(np.int16)).view(torch.bfloat16).float()
        else:
            found = torch.from_numpy(self._unpack_int8(content))
        if not bool(found.isfinite().all()):
            raise FrameError("the hidden states have values that are not finite", code="bad_states")
        return found

    def keeps(self, states: Tensor) -> bool:
        """Return whether these states, shape (rows, hidden), are unchanged on the way."""
        values = states.detach().to("cpu", torch.float32)
        return torch.equal(self.unpack(self.pack(values).tobytes(), len(values)), values)
