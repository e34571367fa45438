"""Memory for packed weights."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21


def huge_pages(num_bytes: int) -> Tensor:
    """Return bytes in huge pages if available: address translation of small pages takes a tenth of a pass.

    The rest after the last whole huge page lies in small pages, so that no memory is in use beyond these bytes.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE
    if num_bytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, skipped, num_bytes // HUGE_PAGE * HUGE_PAGE)
    return whole[skipped : skipped + num_bytes]
