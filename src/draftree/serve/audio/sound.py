"""Sound files as samples: WAV files, and other formats by the package soundfile if it is installed.

A file is decoded and resampled in blocks, up to a length in seconds: a small file can hold hours.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from draftree.core.errors import InvalidRequestError
from draftree.serve.audio.resample import Resampler
from draftree.serve.audio.wav import WavFile, WavFormatError, is_wav

MIN_RATE, MAX_RATE = 1000, 768_000
BLOCK = 2**18
"""Samples of all channels that are decoded at once."""


def read_sound(data: bytes, rate: int, *, max_seconds: float = math.inf) -> np.ndarray:
    """Return the samples of a sound file, the mean of its channels, float32 of shape (samples,).

    Args:
        data: the file.
        rate: samples per second that are wanted.
        max_seconds: longest sound.

    Raises:
        InvalidRequestError: an empty or damaged file, a format that cannot be read here, or a longer sound.
    """
    if not data:
        raise _refusal("is empty: send a sound file")
    blocks = _blocks(data)
    found = next(blocks)
    if not MIN_RATE <= found <= MAX_RATE:
        raise _refusal(f"has {found} samples per second: {MIN_RATE} to {MAX_RATE} are supported")
    resampler = None if found == rate else Resampler(found, rate)
    parts: list[np.ndarray] = []
    num_frames = 0
    for block in blocks:
        num_frames += len(block)
        if num_frames > max_seconds * found:
            raise _refusal(f"holds more than {max_seconds:g} seconds of sound: send a shorter one")
        mono = block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise _refusal("holds samples that are not finite numbers: send it as whole numbers")
        parts.append(mono if resampler is None else resampler.push(mono))
    if not num_frames:
        raise _refusal("holds no samples: send one with sound in it")
    if resampler is not None:
        parts.append(resampler.finish())
    return np.concatenate(parts)


def _blocks(data: bytes) -> Iterator[Any]:
    """Yield the samples per second, and then blocks of samples of shape (samples, channels)."""
    if is_wav(data):
        try:
            file = WavFile.read(data)
        except WavFormatError as error:
            if error.is_damaged:
                raise _refusal(f"{error}: send it anew") from error
        else:
            yield file.rate
            yield from file.blocks(BLOCK)
            return
    soundfile = _soundfile()
    if soundfile is None:
        raise _refusal(
            "is no WAV file with whole-number or floating-point samples, and other formats need the package "
            "soundfile (extra 'audio'), which is not installed on the server: send WAV"
        )
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            yield int(file.samplerate)
            while len(block := file.read(max(1, BLOCK // file.channels), dtype="float32", always_2d=True)):
                yield block
    except InvalidRequestError:
        raise
    except Exception as error:  # the library raises several kinds for damaged files
        raise _refusal("is damaged or of an unknown format: send WAV, FLAC, OGG or MP3") from error


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: its C library is missing
        return None
    return soundfile


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the file {reason}", param="file")
