"""Hidden states on the way: one row of bytes per token, in float32, bfloat16 or int8 with a scale per row.

A row's bytes depend on that row only, so a text does not depend on drafts in any of the formats.

| format | bytes per row | values |
| --- | --- | --- |
| float32 | 4 * hidden | exact |
| bfloat16 | 2 * hidden | rounded to nearest even; exact if the residual stream is bfloat16 |
| int8 | 4 + hidden | a float32 scale, the largest absolute value / 127, then values / scale rounded to nearest even |
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
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
SCALE_BYTES = {"float32": 0, "bfloat16": 0, "int8": 4}


@final
class StateFormat:
    """A format of hidden states.

    Args:
        kind: "float32", "bfloat16" or "int8".
        hidden: values per row.
    """

    def __init__(self, kind: str, hidden: int) -> None:
        self.kind, self.hidden = kind, hidden
        self.row_bytes = SCALE_BYTES[kind] + VALUE_BYTES[kind] * hidden

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
        scales = (np.abs(values).max(axis=1, keepdims=True) / np.float32(MOST)).astype("<f4")
        divisors = np.where(scales > 0, scales, np.float32(1))
        whole = np.clip(np.rint(values / divisors), -MOST, MOST).astype(np.int8)
        return np.concatenate([scales.view(np.uint8).reshape(len(values), 4), whole.view(np.uint8)], axis=1)

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
            scales = np.ascontiguousarray(content[:, :4]).view("<f4").astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                found = torch.from_numpy(content[:, 4:].view(np.int8).astype(np.float32) * scales)
        if not bool(found.isfinite().all()):
            raise FrameError("the hidden states have values that are not finite", code="bad_states")
        return found

    def keeps(self, states: Tensor) -> bool:
        """Return whether these states, shape (rows, hidden), are unchanged on the way."""
        values = states.detach().to("cpu", torch.float32)
        return torch.equal(self.unpack(self.pack(values).tobytes(), len(values)), values)
