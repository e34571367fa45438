"""Torch's operations in the calling thread alone, where others need the processors next.

After an operation that torch shares among threads, these wait for more, awake, for some milliseconds, and hold up
whatever else has threads of its own: a pass in C took 14.1 ms in place of 11.1 after a copy of one row of logits.
Torch's own setter is not used, since it applies to threads that start meanwhile as well.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Libraries(NamedTuple):
    """What torch computes with: OpenMP, and MKL where it is a part of torch."""

    openmp: Any
    mkl: Any


@contextmanager
def single_threaded() -> Iterator[None]:
    """Inside, the calling thread computes alone; other threads are left as they are. May be nested."""
    found = libraries()
    if found is None:
        yield
        return
    before = found.openmp.omp_get_max_threads()
    found.openmp.omp_set_num_threads(1)
    own = found.mkl.MKL_Set_Num_Threads_Local(1) if found.mkl else 0
    try:
        yield
    finally:
        found.openmp.omp_set_num_threads(before)
        if found.mkl:
            found.mkl.MKL_Set_Num_Threads_Local(own)


@functools.cache
def libraries() -> Libraries | None:
    """Those that torch has loaded; None where they cannot be found."""
    try:
        openmp = ctypes.CDLL(None)
        _ = openmp.omp_get_max_threads, openmp.omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    for file in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        with suppress(AttributeError, OSError):
            mkl = ctypes.CDLL(str(file))
            _ = mkl.MKL_Set_Num_Threads_Local
            return Libraries(openmp, mkl)
    return Libraries(openmp, None)
