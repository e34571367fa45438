"""Detection of errors that mean out of memory or out of threads."""

from __future__ import annotations

import errno

__all__ = ["OUT_OF_MEMORY", "is_out_of_memory"]

OUT_OF_MEMORY = (
    "there is not enough memory: raise the limit of this process (ulimit -v, the container's), free memory, "
    "or use a smaller model or dtype"
)
SIGNS = (
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "not enough memory",
    "unable to allocate",
    "out of memory",
    "std::bad_alloc",
    "can't start new thread",
    "unable to mmap",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, comes from a lack of memory."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if any(sign in str(error).lower() for sign in SIGNS):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False
