"""Triton for our kernels, or what lets their modules be imported without it.

To import Triton takes time: import this module, and modules of kernels, only for tensors on a GPU (`runs_triton`).
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:  # torch for CPUs comes without it
    triton, tl = None, None

    def jit(function: Any = None, **options: Any) -> Any:
        """Return the function, which cannot be called."""
        return function or jit


__all__ = ["jit", "tl", "triton"]
