"""Release of memory-mapped pages of weights that were packed.

A loaded weight is often a view of its mapped file. Its pages count as memory of this process from the first read until
the last view is deleted.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from torch import Tensor

MAPS = Path("/proc/self/maps")
SUFFIX = ".safetensors"


class FilePages:
    """Mapped weight files of this process; none if the system does not list them."""

    def __init__(self) -> None:
        self._ranges = _ranges() if hasattr(mmap, "MADV_DONTNEED") else []

    def give_back(self, weight: Tensor) -> bool:
        """Release a weight's pages if they are mapped from a file; later reads load them again.

        Returns:
            Whether pages were released.
        """
        start, size = weight.data_ptr(), weight.numel() * weight.element_size()
        if not any(first <= start and start + size <= end for first, end in self._ranges):
            return False
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= end:
            return False
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        return madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED) == 0


def _ranges() -> list[tuple[int, int]]:
    try:
        lines = MAPS.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        if line.endswith(SUFFIX):
            first, _, end = line.split(maxsplit=1)[0].partition("-")
            found.append((int(first, 16), int(end, 16)))
    return found
