"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage inside, unless it was off already: imports make many objects that stay.

    The collector is that of the process, so that other threads have none meanwhile either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spare_collection() -> None:
    """Exempt all present objects from later collections, to be called when modules that stay were imported.

    Otherwise each full collection examines every object of torch, and so do those of Python's exit, which take 0.4 s.
    Not for use at the exit itself: some libraries report their objects that are not collected then as leaks.
    """
    gc.freeze()
