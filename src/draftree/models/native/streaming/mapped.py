"""Packed layers as mapped memory, which passes can use before a thread has copied them to huge pages.

Pages of the system's cache need no copy, so a start takes no longer than comparing checksums. Copies are worth their
time in longer use: address translation of small pages takes a tenth of a pass.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import threading
import weakref
from typing import Protocol

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.models.native.streaming.reader import Extent, WeightFile

__all__ = ["MappedFile", "copy_in_background"]

logger = logging.getLogger(__name__)

_ending = threading.Event()
_threads = weakref.WeakSet[threading.Thread]()


class MappedFile:
    """Mapped file of packed weights; its memory stays valid as long as a tensor of it exists.

    Args:
        file: the open file.

    Raises:
        ModelLoadError: it cannot be mapped.
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        try:
            with open(file.path, "rb") as opened:
                self._memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"'{file.path}' cannot be mapped: {error}") from error
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def checked(self, extent: Extent, place: Tensor | None = None) -> Tensor:
        """Return the bytes of a layer after their checksum was compared, shape (size,), uint8.

        Args:
            extent: where they are.
            place: memory for a later copy; not used.

        Raises:
            ModelLoadError: the file is damaged.
        """
        end = extent.start + extent.size
        with memoryview(self._memory) as whole, whole[extent.start : end] as content:
            self._file.verify(extent, content)
        return self._bytes[extent.start : end]

    def release(self, extent: Extent) -> None:
        """Let the process forget the pages of a layer; a later read finds them again in the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, extent.start, extent.size)


class MappedLayers(Protocol):
    """Weights some of whose layers are mapped."""

    def copy_layer(self, layer: int) -> None:
        """Copy a layer; raise ModelLoadError if the file cannot be read any more."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def copy_in_background(weights: MappedLayers, count: int) -> threading.Thread:
    """Start a thread that copies the first `count` layers and closes the file; it ends once `weights` is unused."""
    thread = threading.Thread(target=_copy, args=(weakref.ref(weights), count), name="draftree-weights", daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _end_threads() -> None:
    # the interpreter would end threads inside calls of C++, which aborts the process
    _ending.set()
    for thread in list(_threads):
        thread.join()


def _copy(reference: weakref.ref[MappedLayers], count: int) -> None:
    for layer in range(count):
        weights = reference()
        if weights is None or _ending.is_set():
            return
        try:
            weights.copy_layer(layer)
        except (ModelLoadError, MemoryError, RuntimeError) as error:
            logger.info("layers stay mapped, so that passes are slower: %s", error)
            break
        del weights
    if (weights := reference()) is not None:
        weights.close()
