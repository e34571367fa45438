"""Sound files as samples, and transcripts as subtitles.

WAV files are read here, other formats by the package soundfile if it is installed. A file is decoded and resampled in
blocks, up to a length in seconds: a small file can hold hours.
"""

from __future__ import annotations

import io
import math
import statistics
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from draftree.core.errors import InvalidRequestError
from draftree.outputs import Completion
from draftree.speech.transcriber import Segment
from draftree.speech.windows import Transcript

TAPS = 24  # input samples on each side of an output sample, for the lower of both rates
PHASES = 1024
BETA = 9.0  # shape of the Kaiser window: side lobes of -90 dB
STEP = 2**20


@final
class Resampler:
    """Samples at another rate, in blocks: an interpolated windowed sinc, which removes what aliases.

    Each output sample is the sum of the input samples around its place, weighted by a kernel whose phase is the place's
    distance from the input sample before it. Kernels of `PHASES` phases are tabulated, and interpolated between them,
    with an error below 1e-6 of the amplitude; ratios of few phases have kernels of exactly these.
    """

    def __init__(self, rate: int, wanted: int) -> None:
        common = math.gcd(rate, wanted)
        self._up, self._down = wanted // common, rate // common
        cutoff = min(1.0, wanted / rate)
        self._half = math.ceil(TAPS / cutoff)
        self._phases = self._up if self._up <= PHASES else PHASES
        self._kernels = _kernels(self._phases, cutoff, self._half)
        self._inputs = np.zeros(self._half, np.float32)
        self._first = -self._half  # place of the first kept input sample; those before the beginning are 0
        self._num_outputs = 0

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Read samples, float32 of shape (samples,), and return the next ones of the result."""
        self._inputs = np.concatenate([self._inputs, samples])
        return self._written(self._first + len(self._inputs) - self._half - 1)

    def finish(self) -> np.ndarray:
        num_inputs = self._first + len(self._inputs)
        self._inputs = np.concatenate([self._inputs, np.zeros(self._half + 1, np.float32)])
        return self._written(num_inputs)

    def _written(self, end: int) -> np.ndarray:
        """Return the outputs that lie before an input place, and forget the inputs that no later output reads."""
        count = max(0, -(-end * self._up // self._down) - self._num_outputs)
        result = np.empty(count, np.float32)
        size = 2 * self._half + 1
        step = max(1, STEP // size)
        windows = np.lib.stride_tricks.sliding_window_view(self._inputs, size) if count else None
        for start in range(0, count, step):
            assert windows is not None
            places = (self._num_outputs + np.arange(start, min(count, start + step))) * self._down
            inputs = windows[places // self._up - self._half - self._first]
            phase, rest = np.divmod(places % self._up * self._phases, self._up)
            values = np.einsum("ij,ij->i", inputs, self._kernels[phase])
            if rest.any():
                share = (rest / self._up).astype(np.float32)
                values += share * (np.einsum("ij,ij->i", inputs, self._kernels[phase + 1]) - values)
            result[start : start + step] = values
        self._num_outputs += count
        kept = self._num_outputs * self._down // self._up - self._half
        if kept > self._first:
            self._inputs = self._inputs[kept - self._first :].copy()
            self._first += kept - self._first
        return result


def _kernels(phases: int, cutoff: float, half: int) -> np.ndarray:
    """Return the weights of the inputs from -half to half for all phases, the first of the next input included."""
    offsets = np.arange(-half, half + 1)[None] - np.arange(phases + 1)[:, None] / phases
    window = np.i0(BETA * np.sqrt(np.clip(1 - (offsets / (half + 1)) ** 2, 0, None)))
    kernels = np.sinc(cutoff * offsets) * window
    return (kernels / kernels.sum(axis=1, keepdims=True)).astype(np.float32)


PCM = 1
FLOAT = 3
EXTENSIBLE = 0xFFFE
WIDTHS = {PCM: (1, 2, 3, 4), FLOAT: (4, 8)}
UNKNOWN_SIZES = (0, 0xFFFFFFFF)


class WavFormatError(Exception):
    """A file that cannot be read; the message completes "the file …"."""

    def __init__(self, message: str, *, is_damaged: bool = True) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged  # whether no other program could read it either


@dataclass(frozen=True, slots=True)
class WavFile:
    """The samples of a WAV file (RIFF WAVE): integers of 8 to 32 bits or floating-point numbers.

    Python's `wave` reads neither floating-point samples nor, before Python 3.12, the extensible header, and takes sizes
    at their word: programs that write to a pipe leave them at 0 or at their maximum.
    """

    rate: int
    channels: int
    is_float: bool
    width: int
    samples: memoryview

    @classmethod
    def read(cls, data: bytes) -> WavFile:
        form: bytes | None = None
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
                form = data[place : place + size]
            place += size + size % 2
        raise WavFormatError("is a damaged WAV file (no samples)")

    @classmethod
    def _of(cls, form: bytes, samples: memoryview) -> WavFile:
        if len(form) < 16:
            raise WavFormatError("is a damaged WAV file (a short format)")
        tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
        if tag == EXTENSIBLE and len(form) >= 26:
            (tag,) = struct.unpack_from("<H", form, 24)  # the first bytes of the identifier of the format
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


MIN_RATE, MAX_RATE = 1000, 768_000
BLOCK = 2**18


def read_sound(data: bytes, rate: int, *, max_seconds: float = math.inf) -> np.ndarray:
    """Return the mean of a sound file's channels at a rate, float32 of shape (samples,)."""
    if not data:
        raise _refusal("is empty: send a sound file")
    blocks = _blocks(data)
    source_rate = next(blocks)
    if not MIN_RATE <= source_rate <= MAX_RATE:
        raise _refusal(f"has {source_rate} samples per second: {MIN_RATE} to {MAX_RATE} are supported")
    resampler = None if source_rate == rate else Resampler(source_rate, rate)
    parts: list[np.ndarray] = []
    num_frames = 0
    for block in blocks:
        num_frames += len(block)
        if num_frames > max_seconds * source_rate:
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
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
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


def srt(segments: Sequence[Segment]) -> str:
    parts = [
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{segment.text.strip()}\n\n"
        for number, segment in enumerate(segments, 1)
    ]
    return "".join(parts)


def vtt(segments: Sequence[Segment]) -> str:
    # an arrow would end the text of a subtitle
    parts = [
        f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{segment.text.strip().replace('-->', '->')}\n\n"
        for segment in segments
    ]
    return "WEBVTT\n\n" + "".join(parts)


def _time(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    hours, rest = divmod(whole, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def segments_json(
    segments: Sequence[Segment], done: Completion | Transcript, *, temperature: float, no_speech: float | None
) -> list[dict[str, Any]]:
    logprobs = [entry.logprob for entry in done.logprobs or ()]
    return [
        {
            "id": number,
            "seek": 0,
            "start": round(segment.start, 3),
            "end": round(segment.end, 3),
            "text": segment.text,
            "tokens": list(done.token_ids[segment.first : segment.last]),
            "temperature": temperature,
            "avg_logprob": statistics.fmean(values) if (values := logprobs[segment.first : segment.last]) else None,
            "compression_ratio": len(raw) / len(zlib.compress(raw)) if (raw := segment.text.encode()) else 1.0,
            "no_speech_prob": no_speech,
        }
        for number, segment in enumerate(segments)
    ]
