"""Memory that maps files of weights: what was packed need not be held there as well.

A loaded weight is often a view of its file. Its pages count as this process's memory from the first read on, until the
last view of the file is gone.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from torch import Tensor

MAPS = Path("/proc/self/maps")
SUFFIX = ".safetensors"


class FilePages:
    """The mapped files of weights of this process, as they are now; none where the system does not say."""

    def __init__(self) -> None:
        self._ranges = _ranges() if hasattr(mmap, "MADV_DONTNEED") else []

    def give_back(self, weight: Tensor) -> bool:
        """Let a weight's pages go, if they are of a file: who reads them again reads the file again.

        Returns:
            Whether there was anything to let go.
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
