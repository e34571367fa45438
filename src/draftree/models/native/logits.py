"""Logits of a pass in C: searched in place, without a tensor.

After a pass the caches are cold, and creating a torch tensor takes longer than a search.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.host import single_threaded
from draftree.models.native.library import Library
from draftree.models.native.logit_buffers import FLOAT_BYTES, RowsAt
from draftree.sampling.logits import NEAR, Logits, Picks, RowNoise, TensorLogits, Top, decided, is_close

FEW = 4
"""Number of top scores that show whether a pick is close."""


@final
@dataclass(frozen=True, slots=True)
class NativeLogits(Logits):
    """Float32 rows in host memory.

    Attributes:
        library: library with the search.
        at: location of the rows.
        memory: owner of the memory, a ctypes array or a tensor.
        num_threads: threads of a search.
    """

    library: Library
    at: RowsAt
    memory: Any
    num_threads: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.at.rows

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.at.width

    def tensor(self) -> Tensor:
        """Return the rows as a tensor that shares the memory."""
        at = self.at
        if isinstance(self.memory, Tensor):
            first = (at.address - self.memory.data_ptr()) // FLOAT_BYTES
            return self.memory.as_strided((at.rows, at.width), (at.stride, 1), self.memory.storage_offset() + first)
        if not at.rows:
            return torch.empty(0, at.width)
        start = at.address - ctypes.addressof(self.memory)
        numbers = torch.frombuffer(self.memory, dtype=torch.float32, count=at.rows * at.stride, offset=start)
        return numbers.view(at.rows, at.stride)[:, : at.width]

    def rows(self, start: int, stop: int) -> NativeLogits:
        """Return some rows as a view."""
        address = self.at.address + FLOAT_BYTES * start * self.at.stride
        return replace(self, at=self.at._replace(address=address, rows=stop - start))

    def narrowed(self, width: int) -> NativeLogits:
        """Return the first columns as a view."""
        return replace(self, at=self.at._replace(width=width))

    def replaced(self, tensor: Tensor) -> Logits:
        """Return logits of a tensor; torch searches them unless they are float32 rows in host memory."""
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.stride(-1) != 1:
            return TensorLogits(tensor)
        at = RowsAt(tensor.data_ptr(), tensor.shape[0], tensor.stride(0), tensor.shape[1])
        return replace(self, at=at, memory=tensor)

    def picks(self, noise: RowNoise) -> Picks:
        """Return the picks, searched in C."""
        has_noise = any(noise)
        count = min(FEW, self.at.width) if has_noise else 1
        found = self.library.search(self.at, noise, count, totals=False, num_threads=self.num_threads)
        picks = [tokens[0] for tokens in found.tokens]
        for row, (entry, scores) in enumerate(zip(noise, found.scores, strict=True) if has_noise else ()):
            if entry is not None and is_close(scores):
                picks[row] = self._decided(row, entry)
        return Picks(picks, [math.isfinite(scores[0]) for scores in found.scores])

    def _decided(self, row: int, noise: tuple[tuple[int, int], float]) -> int:
        at = self.at._replace(address=self.at.address + FLOAT_BYTES * row * self.at.stride, rows=1)
        count = min(self.library.max_count, at.width)
        found = self.library.search(at, [noise], count, totals=False, num_threads=self.num_threads)
        tokens, scores = found.tokens[0], found.scores[0]
        near = sorted(token for token, score in zip(tokens, scores, strict=True) if score >= scores[0] - NEAR)
        logits = [ctypes.c_float.from_address(at.address + FLOAT_BYTES * token).value for token in near]
        return decided(near, logits, noise)

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        """Return the top scores, searched in C, or in torch if there are more than C supports."""
        if count <= min(self.library.max_count, self.at.width):
            return self.library.search(self.at, noise, count, totals=True, num_threads=self.num_threads)
        with self.computing():
            return TensorLogits(self.tensor()).top(noise, count, overwrites=overwrites)

    def computing(self) -> AbstractContextManager[object]:
        """Limit torch to one thread: idle threads would spin after an operation and delay the next pass."""
        return single_threaded()
