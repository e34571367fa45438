"""Reader of packed layers: a thread reads the next layers into buffers while the current one computes."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.models.native.huge_pages import huge_pages

PIECE = 8 << 20
"""Bytes per read: smaller ones do not use the full speed of a solid-state drive."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Place of one layer in the file; start and size are multiples of a page.

    Attributes:
        start: first byte.
        size: number of bytes.
        checksum: CRC-32 of the bytes.
    """

    start: int
    size: int
    checksum: int


class WeightFile:
    """Open file of packed weights, read without the system's page cache where the file system supports that.

    Args:
        path: path of the file.
        is_cached: whether the system's page cache is used, for a file that is read once per process.

    Raises:
        ModelLoadError: it cannot be opened.
    """

    def __init__(self, path: Path, *, is_cached: bool = False) -> None:
        self.path = path
        self._is_cached = is_cached
        self.num_bytes = 0
        """Bytes read so far."""
        self._verified: set[int] = set()
        try:
            self._descriptor, self.is_direct = self._opened()
        except OSError as error:
            raise ModelLoadError(f"'{path}' cannot be opened: {error.strerror}") from error

    def _opened(self) -> tuple[int, bool]:
        direct = getattr(os, "O_DIRECT", 0)
        if direct and not self._is_cached:
            with contextlib.suppress(OSError):  # some file systems have no direct reads
                return os.open(self.path, os.O_RDONLY | direct), True
        return os.open(self.path, os.O_RDONLY), False

    def read(self, extent: Extent, buffer: Tensor) -> None:
        """Read a layer into the beginning of a buffer, and compare its checksum the first time.

        Raises:
            ModelLoadError: the file is shorter, damaged or unreadable.
        """
        view = buffer.numpy().data[: extent.size]
        done = 0
        try:
            while done < extent.size:
                count = os.preadv(self._descriptor, [view[done : done + PIECE]], extent.start + done)
                if not count:
                    raise ModelLoadError(f"'{self.path}' ends early: delete its folder, and it is written again")
                done += count
            if not (self.is_direct or self._is_cached) and hasattr(os, "posix_fadvise"):
                # these pages are not read again before all others
                os.posix_fadvise(self._descriptor, extent.start, extent.size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ModelLoadError(f"'{self.path}' cannot be read: {error.strerror}") from error
        self.num_bytes += extent.size
        self.verify(extent, view)

    def verify(self, extent: Extent, content: memoryview) -> None:
        """Compare the checksum of a layer with its content, the first time.

        Raises:
            ModelLoadError: the file is damaged.
        """
        if extent.start not in self._verified:
            if zlib.crc32(content) != extent.checksum:
                raise ModelLoadError(f"'{self.path}' is damaged: delete its folder, and it is written again")
            self._verified.add(extent.start)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LayerReader:
    """Buffers that a thread fills with layers in cyclic order, ahead of their use.

    One thread takes and releases layers. The reader starts with the first `take`, so a model that is never run reads
    nothing.

    Args:
        file: the file; closed with the reader.
        extents: places of the layers, in the order of their use.
        num_buffers: number of buffers; each has the size of the largest layer.
    """

    def __init__(self, file: WeightFile, extents: Sequence[Extent], num_buffers: int) -> None:
        self._file, self._extents = file, extents
        largest = max(extent.size for extent in extents)
        self._free = deque(huge_pages(largest) for _ in range(num_buffers))
        self._ready: dict[int, Tensor] = {}
        self._in_use: dict[int, Tensor] = {}
        self._next = 0
        self._reading: int | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, index: int) -> Tensor:
        """Return the buffer with the layer of this index in `extents`; it is unchanged until `release`.

        Waits for the reader. A layer out of order discards what was read ahead.

        Raises:
            ModelLoadError: the file cannot be read.
            RuntimeError: the reader is closed.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the weights of this model were closed")
            self._start()
            if index not in self._ready and index not in (self._reading, self._next):
                self._jump(index)
            self._changed.wait_for(lambda: index in self._ready or self._error is not None)
            if self._error is not None:
                raise self._error
            self._in_use[index] = self._ready.pop(index)
            return self._in_use[index]

    def release(self, index: int) -> None:
        """Let the reader use the buffer of a layer again."""
        with self._changed:
            self._free.append(self._in_use.pop(index))
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and close the file; buffers that are in use stay valid."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._file.close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_ahead, name="draftree-weights", daemon=True)
            self._thread.start()

    def _jump(self, index: int) -> None:
        self._free.extend(self._ready.values())
        self._ready.clear()
        self._next = index
        self._changed.notify_all()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or bool(self._free))
                if self._is_closed:
                    return
                index, buffer = self._next, self._free.popleft()
                self._reading, self._next = index, (index + 1) % len(self._extents)
            try:
                self._file.read(self._extents[index], buffer)
            except BaseException as error:
                with self._changed:
                    self._error, self._reading = error, None
                    self._changed.notify_all()
                return
            with self._changed:
                self._reading = None
                if index in self._ready or index in self._in_use or self._next != (index + 1) % len(self._extents):
                    self._free.append(buffer)  # not the layer that is wanted any more
                else:
                    self._ready[index] = buffer
                self._changed.notify_all()
