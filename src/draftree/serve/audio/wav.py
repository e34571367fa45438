"""WAV files (RIFF WAVE) as blocks of samples: whole numbers of 8 to 32 bits and floating-point numbers.

Python's `wave` reads neither floating-point samples nor, before Python 3.12, the extensible header, and takes sizes at
their word: programs that write to a pipe leave them at 0 or at their maximum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["WavFile", "WavFormatError", "is_wav"]

PCM = 1
FLOAT = 3
EXTENSIBLE = 0xFFFE
WIDTHS = {PCM: (1, 2, 3, 4), FLOAT: (4, 8)}
"""Bytes of a sample by format."""
UNKNOWN_SIZES = (0, 0xFFFFFFFF)
"""Sizes in the headers of files that were written to a pipe."""


class WavFormatError(Exception):
    """A file that cannot be read; the message completes "the file …"."""

    def __init__(self, message: str, *, is_damaged: bool = True) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged
        """Whether no other program could read it either."""


def is_wav(data: bytes) -> bool:
    """Return whether data begins as a WAV file."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


@dataclass(frozen=True, slots=True)
class WavFile:
    """The samples of a WAV file.

    Attributes:
        rate: samples per second.
        channels: number of channels.
        is_float: whether samples are floating-point numbers.
        width: bytes of a sample.
        samples: the bytes of all samples.
    """

    rate: int
    channels: int
    is_float: bool
    width: int
    samples: memoryview

    @classmethod
    def read(cls, data: bytes) -> WavFile:
        """Read the headers of a file.

        Raises:
            WavFormatError: the file is damaged, or has samples of another kind.
        """
        form: tuple[int, int, int, int] | None = None
        (riff_size,) = struct.unpack_from("<I", data, 4)
        place = 12
        while place + 8 <= len(data):
            name, size = struct.unpack_from("<4sI", data, place)
            place += 8
            if name == b"data":
                if form is None:
                    raise WavFormatError("is a damaged WAV file (no format before the samples)")
                is_empty = size == 0 and 8 + riff_size == place
                end = len(data) if size in UNKNOWN_SIZES and not is_empty else min(place + size, len(data))
                return cls._of(form, memoryview(data)[place:end])
            if name == b"fmt ":
                form = _format(data[place : place + size])
            place += size + size % 2
        raise WavFormatError("is a damaged WAV file (no samples)")

    @classmethod
    def _of(cls, form: tuple[int, int, int, int], samples: memoryview) -> WavFile:
        tag, channels, rate, bits = form
        if tag not in WIDTHS:
            raise WavFormatError(f"is a WAV file of the format {tag:#06x}", is_damaged=False)
        width = bits // 8
        if bits % 8 or width not in WIDTHS[tag] or not channels:
            raise WavFormatError(
                f"has {bits} bits per sample and {channels} channels: whole numbers of 8, 16, 24 and 32 bits and "
                "floating-point numbers of 32 and 64 bits are supported"
            )
        return cls(rate, channels, tag == FLOAT, width, samples)

    @property
    def num_frames(self) -> int:
        """Number of samples of each channel."""
        return len(self.samples) // (self.width * self.channels)

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        """Yield float32 samples of shape (frames, channels), at most `size` samples in a block, or one frame."""
        frames = max(1, size // self.channels)
        for first in range(0, self.num_frames, frames):
            last = min(self.num_frames, first + frames)
            scale = self.width * self.channels
            yield self._values(self.samples[first * scale : last * scale]).reshape(-1, self.channels)

    def _values(self, raw: memoryview) -> np.ndarray:
        if self.is_float:
            with np.errstate(over="ignore"):  # what is too large becomes infinite
                return np.frombuffer(raw, f"<f{self.width}").astype(np.float32)
        if self.width == 1:  # unsigned
            return np.frombuffer(raw, np.uint8).astype(np.float32) / 128 - 1
        if self.width == 3:
            padded = np.zeros((len(raw) // 3, 4), np.uint8)
            padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
            return padded.view("<i4")[:, 0].astype(np.float32) / 2**31
        return np.frombuffer(raw, f"<i{self.width}").astype(np.float32) / 2 ** (8 * self.width - 1)


def _format(chunk: bytes) -> tuple[int, int, int, int]:
    """Return format, channels, rate and bits per sample of a format chunk."""
    if len(chunk) < 16:
        raise WavFormatError("is a damaged WAV file (a short format)")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == EXTENSIBLE and len(chunk) >= 26:
        (tag,) = struct.unpack_from("<H", chunk, 24)  # the first bytes of the identifier of the format
    return tag, channels, rate, bits
