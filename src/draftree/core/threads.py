"""Single-threaded torch operations, for use directly before multi-threaded work.

After an operation that torch runs on several threads, its workers spin for some milliseconds and slow down any other
thread pool: a native pass took 14.1 ms instead of 11.1 after a copy of one row of logits.
Torch's own setter is not used, because it also applies to threads that start meanwhile.
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
    """The libraries that torch computes with: OpenMP, and MKL if it is a part of torch."""

    openmp: Any
    mkl: Any


class Alone:
    """Context in which this thread computes single-threaded from `begin` on; other threads are not affected.

    Args:
        where: False makes it a no-op.
    """

    __slots__ = ("_before", "_where")

    def __init__(self, *, where: bool = True) -> None:
        self._where = where
        self._before: tuple[Libraries, int, int] | None = None

    def begin(self) -> None:
        """Start single-threaded computation; idempotent."""
        found = libraries() if self._where and self._before is None else None
        if found is None:
            return
        before = found.openmp.omp_get_max_threads()
        found.openmp.omp_set_num_threads(1)
        self._before = found, before, found.mkl.MKL_Set_Num_Threads_Local(1) if found.mkl else 0

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        found, threads, own = self._before
        self._before = None
        found.openmp.omp_set_num_threads(threads)
        if found.mkl:
            found.mkl.MKL_Set_Num_Threads_Local(own)


@contextmanager
def one_thread(*, where: bool = True) -> Iterator[None]:
    """Run the block single-threaded in this thread; other threads are not affected.

    Args:
        where: False makes it a no-op.
    """
    with Alone(where=where) as alone:
        alone.begin()
        yield


@functools.cache
def libraries() -> Libraries | None:
    """Return the libraries that torch has loaded; None if they cannot be found."""
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
