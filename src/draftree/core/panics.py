"""Panics of Rust libraries as ordinary exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["panics_as_errors"]


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise `RuntimeError` for a panic, which derives from `BaseException` and would end threads and servers."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error
