"""Sound files as samples: WAV by the standard library, other formats by the package soundfile if it is installed."""

from __future__ import annotations

import io
import math
import wave
from typing import Any

import numpy as np

from draftree.core.errors import InvalidRequestError

TAPS = 24
"""Input samples on each side of an output sample, for the lower of both rates."""
MIN_RATE, MAX_RATE = 1000, 768_000


def read_sound(data: bytes, rate: int) -> np.ndarray:
    """Return the samples of a sound file, the mean of its channels, float32 of shape (samples,).

    Args:
        data: the file.
        rate: samples per second that are wanted.

    Raises:
        InvalidRequestError: an empty or damaged file, or a format that cannot be read here.
    """
    if not data:
        raise _refusal("is empty: send a sound file")
    whole, found = _read_wav(data) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else _read_other(data)
    if not MIN_RATE <= found <= MAX_RATE:
        raise _refusal(f"has {found} samples per second: {MIN_RATE} to {MAX_RATE} are supported")
    if not len(whole):
        raise _refusal("holds no samples: send one with sound in it")
    return resampled(whole.mean(axis=1, dtype=np.float32), found, rate)


def _read_wav(data: bytes) -> tuple[np.ndarray, int]:
    """Return samples of shape (samples, channels) and their rate."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        if "unknown format" in str(error):  # such as floating-point samples
            return _read_other(data)
        raise _refusal(f"is a damaged WAV file ({error})") from error
    if width not in (1, 2, 3, 4) or not channels:
        raise _refusal(f"has {8 * width} bits per sample and {channels} channels: 8, 16, 24 and 32 bits are supported")
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if width == 1:  # unsigned
        values = np.frombuffer(raw, np.uint8).astype(np.float32) / 128 - 1
    elif width == 3:
        bytes_of = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        padded = np.concatenate([np.zeros((len(bytes_of), 1), np.uint8), bytes_of], axis=1)
        values = padded.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        values = np.frombuffer(raw, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)
    return values.reshape(-1, channels), rate


def _read_other(data: bytes) -> tuple[np.ndarray, int]:
    soundfile = _soundfile()
    if soundfile is None:
        raise _refusal(
            "is no WAV file with whole-number samples, and other formats need the package soundfile, which is not "
            "installed on the server: send WAV"
        )
    try:
        values, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except Exception as error:  # the library raises several kinds for damaged files
        raise _refusal("is damaged or of an unknown format: send WAV, FLAC, OGG or MP3") from error
    return values, int(rate)


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: its C library is missing
        return None
    return soundfile


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the file {reason}", param="file")


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Return samples at another rate: a polyphase filter with a windowed sinc, which removes what aliases.

    Args:
        samples: float32 of shape (samples,).
        rate: samples per second.
        wanted: samples per second of the result.
    """
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    cutoff = min(1.0, wanted / rate)
    half = math.ceil(TAPS / cutoff)
    count = math.ceil(len(samples) * up / down)
    padded = np.concatenate([np.zeros(half, np.float32), samples, np.zeros(half + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    taps = np.arange(-half, half + 1, dtype=np.float64)
    result = np.empty(count, np.float32)
    for first in range(min(up, count)):
        outputs = np.arange(first, count, up)
        place = first * down
        # all outputs of a phase lie at the same distance from their nearest input sample before them
        offset = taps - (place % up) / up
        kernel = cutoff * np.sinc(cutoff * offset) * _window(offset / (half + 1))
        inputs = place // up + np.arange(len(outputs)) * down
        result[outputs] = windows[inputs] @ (kernel / kernel.sum()).astype(np.float32)
    return result


def _window(places: np.ndarray) -> np.ndarray:
    """Return a Kaiser window at places from -1 to 1."""
    beta = 9.0
    shape: np.ndarray = np.i0(beta * np.sqrt(np.clip(1 - places**2, 0, None))) / np.i0(beta)
    return shape
