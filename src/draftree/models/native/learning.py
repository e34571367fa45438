"""Corrections of a head's logits in C, in place of torch operations, of which each costs as much as a whole update."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from draftree.models.native.library import library
from draftree.models.native.logit_buffers import FLOAT_BYTES

ARRAYS = ("bias", "rows", "mix", "bias_squares", "rows_squares", "mix_squares")


class CCorrection(ctypes.Structure):
    """`Correction`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ARRAYS),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "rank")),
    )


@final
class NativeCorrection:
    """The arrays of a correction, changed in place by C.

    Args:
        arrays: `ARRAYS` by name, contiguous float32 in host memory; rows has shape (rank, tokens), mix (rank, hidden).

    Raises:
        NativeUnavailableError: the library cannot be built or loaded.
    """

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
    assert logits.element_size() == FLOAT_BYTES, "corrections in C are float32"
    assert logits.stride(1) == 1, "the columns of a row are contiguous"
    return logits.stride(0)
