"""Logits of a native forward pass: searched in place, of some tokens only, and corrected online."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.host import single_threaded
from draftree.models.native.library import FLOAT_BYTES, Library, RowsAt, library
from draftree.sampling.logits import (
    NEAR,
    Logits,
    Picks,
    RowNoise,
    SubsetLogits,
    TensorLogits,
    TokenSubset,
    Top,
    decided,
    is_close,
)

FEW = 4  # number of top scores that show whether a pick is close


def num_compared(noise: RowNoise, width: int) -> int:
    """Return the number of top scores that show the picks of rows."""
    return min(FEW, width) if any(noise) else 1


@final
@dataclass(frozen=True, slots=True)
class NativeLogits(Logits):
    """Float32 rows in host memory."""

    library: Library  # library with the search
    at: RowsAt  # location of the rows
    memory: Any  # owner of the memory, a ctypes array or a tensor
    num_threads: int  # threads of a search

    @property
    def num_rows(self) -> int:
        return self.at.rows

    @property
    def width(self) -> int:
        return self.at.width

    def tensor(self) -> Tensor:
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
        address = self.at.address + FLOAT_BYTES * start * self.at.stride
        return replace(self, at=self.at._replace(address=address, rows=stop - start))

    def narrowed(self, width: int) -> NativeLogits:
        return replace(self, at=self.at._replace(width=width))

    def replaced(self, tensor: Tensor) -> Logits:
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.stride(-1) != 1:
            return TensorLogits(tensor)
        at = RowsAt(tensor.data_ptr(), tensor.shape[0], tensor.stride(0), tensor.shape[1])
        return replace(self, at=at, memory=tensor)

    def picks(self, noise: RowNoise) -> Picks:
        has_noise = any(noise)
        count = num_compared(noise, self.at.width)
        top = self.library.search(self.at, noise, count, totals=False, num_threads=self.num_threads)
        picks = [tokens[0] for tokens in top.tokens]
        for row, (entry, scores) in enumerate(zip(noise, top.scores, strict=True) if has_noise else ()):
            if entry is not None and is_close(scores):
                picks[row] = self._decided(row, entry)
        return Picks(picks, [math.isfinite(scores[0]) for scores in top.scores])

    def _decided(self, row: int, noise: tuple[tuple[int, int], float]) -> int:
        at = self.at._replace(address=self.at.address + FLOAT_BYTES * row * self.at.stride, rows=1)
        count = min(self.library.max_count, at.width)
        top = self.library.search(at, [noise], count, totals=False, num_threads=self.num_threads)
        tokens = top.tokens[0]
        scores = top.scores[0]
        near = sorted(token for token, score in zip(tokens, scores, strict=True) if score >= scores[0] - NEAR)
        logits = [ctypes.c_float.from_address(at.address + FLOAT_BYTES * token).value for token in near]
        return decided(near, logits, noise)

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        if count <= min(self.library.max_count, self.at.width):
            return self.library.search(self.at, noise, count, totals=True, num_threads=self.num_threads)
        with self.computing():
            return TensorLogits(self.tensor()).top(noise, count, overwrites=overwrites)

    def computing(self) -> AbstractContextManager[object]:
        """Limit torch to one thread: idle threads would spin after an operation and delay the next pass."""
        return single_threaded()


SEARCHED = 64  # the C library reads token ids of columns in groups of this size


@final
class NativeSubset:
    """Tokens that have a column, in the format of the C library."""

    __slots__ = ("address", "ids", "tokens")

    def __init__(self, tokens: TokenSubset) -> None:
        self.tokens = tokens
        self.ids = array("i", [*tokens.names, *[0] * (-len(tokens.names) % SEARCHED)])
        self.address = self.ids.buffer_info()[0]


@final
class NativeSubsetLogits(Logits):
    """Logits of the tokens of a subset; all others have -inf."""

    __slots__ = ("_columns", "_subset")

    def __init__(self, columns: NativeLogits, subset: NativeSubset) -> None:
        assert columns.width == len(subset.tokens.names), "every column has a token"
        self._columns = columns
        self._subset = subset

    @property
    def num_rows(self) -> int:
        return self._columns.num_rows

    @property
    def width(self) -> int:
        return self._subset.tokens.width

    def tensor(self) -> Tensor:
        return self._by_torch().tensor()

    def columns(self) -> Tensor:
        """Return the columns of the subset, which share the memory of the pass."""
        return self._columns.tensor()

    def rows(self, start: int, stop: int) -> NativeSubsetLogits:
        return NativeSubsetLogits(self._columns.rows(start, stop), self._subset)

    def narrowed(self, width: int) -> TensorLogits:
        return self._by_torch().narrowed(width)

    def replaced(self, tensor: Tensor) -> Logits:
        return self._columns.replaced(tensor)

    def picks(self, noise: RowNoise) -> Picks:
        return self._columns.replaced(self.tensor()).picks(noise)

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        """Return the largest entries among the columns, at most as many as there are; a native search if it can."""
        columns, names = self._columns, self._subset.tokens.names
        count = min(count, len(names))
        library = columns.library
        if count > library.max_count:
            with columns.computing():
                return self._by_torch().top(noise, count, overwrites=overwrites)
        best = library.search(
            columns.at, noise, count, totals=True, num_threads=columns.num_threads, ids=self._subset.address
        )
        return best._replace(tokens=[[names[column] for column in row] for row in best.tokens])

    def computing(self) -> AbstractContextManager[object]:
        return self._columns.computing()

    def _by_torch(self) -> SubsetLogits:
        return SubsetLogits(self._columns.tensor(), self._subset.tokens)


ARRAYS = ("bias", "rows", "mix", "bias_squares", "rows_squares", "mix_squares")


class CCorrection(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ARRAYS),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "rank")),
    )


@final
class NativeCorrection:
    """`ARRAYS` of a correction, float32, changed in place by C: rows (rank, tokens), mix (rank, hidden), …."""

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        self._library = library()
        self._arrays = dict(arrays)  # C has their addresses
        rank, hidden = arrays["mix"].shape
        self._correction = CCorrection(
            *(arrays[name].data_ptr() for name in ARRAYS), arrays["bias"].shape[0], hidden, rank
        )
        self._at = ctypes.addressof(self._correction)

    def apply(self, logits: Tensor, states: Tensor) -> None:
        """Correct logits, shape (rows, tokens), by states, contiguous, shape (rows, hidden)."""
        self._library.correct(self._at, logits.data_ptr(), _stride(logits), states.data_ptr(), len(logits))

    def update(
        self, logits: Tensor, states: Tensor, columns: Sequence[int], temperatures: Sequence[float], rate: float
    ) -> None:
        """Take a step for each row, in order; the logits are overwritten."""
        count = len(columns)
        places, divisors = (ctypes.c_int64 * count)(*columns), (ctypes.c_float * count)(*temperatures)
        self._library.learn(
            self._at, logits.data_ptr(), _stride(logits), states.data_ptr(), places, divisors, count, rate
        )


def _stride(logits: Tensor) -> int:
    assert logits.element_size() == FLOAT_BYTES, "native corrections are float32"
    assert logits.stride(1) == 1, "the columns of a row are contiguous"
    return logits.stride(0)
