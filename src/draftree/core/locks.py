"""Locks on files and folders, held by one process at a time and released when the process ends."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import final

try:
    import fcntl
except ImportError:  # not on Windows, where two processes are not kept apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["PathLock"]


@final
class PathLock:
    """Keeps other processes from a file or a folder while this object lives.

    Args:
        path: a folder, or a file that is made if it does not exist.

    Raises:
        BlockingIOError: another holder has it.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, flags, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        self._release = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        """Let others have it."""
        self._release()
