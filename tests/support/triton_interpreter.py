"""Triton's interpreter, repaired: it runs kernels where there is no GPU. `conftest.py` selects it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter


def _widened(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == interpreter.tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, c: Any, *options: Any) -> Any:
    product = (_widened(a)[:, :, None] * _widened(b)[None]).sum(axis=1)
    return interpreter.TensorHandle(product + c.data, c.dtype.scalar)


def _run(kernel: Any, args: Any, kwargs: Any) -> None:
    with _disable_current_modes():
        kernel(*args, **kwargs)


def repair(change: Callable[[Any, str, Any], None], launch: Callable[[Any, Any, Any], None] = _run) -> None:
    """Repair scalars with newer numpy, dot products, and launches inside of dispatch modes.

    The interpreter multiplies the bits of bfloat16, and numpy's product of matrices rounds a row differently at other
    places. `change`: sets an attribute of an object. `launch`: runs a kernel with its arguments.
    """
    patch_tensor, execute = interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    change(interpreter, "_patch_lang_tensor", patched)
    change(interpreter.InterpreterBuilder, "create_dot", _dot)
    change(
        interpreter.GridExecutor,
        "__call__",
        lambda self, *args, **kwargs: launch(lambda *a, **k: execute(self, *a, **k), args, kwargs),
    )
