"""Return of freed memory to the system."""

from __future__ import annotations

import ctypes
import gc
import os

__all__ = ["return_free_memory"]


def return_free_memory() -> None:
    """Collect unreachable objects, and return free pages of the C library's heap to the system.

    The GNU library keeps up to 64 MB of freed temporaries; other libraries return them themselves.
    """
    gc.collect()
    if os.name != "posix":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
