"""Resampling of sound in blocks: an interpolated windowed sinc, which removes what aliases.

Each output sample is the sum of the input samples around its place, weighted by a kernel whose phase is the place's
distance from the input sample before it. Kernels of `PHASES` phases are tabulated, and interpolated between them, with
an error below 1e-6 of the amplitude; ratios of few phases have kernels of exactly these.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np

__all__ = ["Resampler"]

TAPS = 24
"""Input samples on each side of an output sample, for the lower of both rates."""
PHASES = 1024
BETA = 9.0
"""Shape of the Kaiser window: side lobes of -90 dB."""
STEP = 2**20
"""Weights of one step, which bounds the memory."""


@final
class Resampler:
    """Samples at another rate, in blocks.

    Args:
        rate: samples per second.
        wanted: samples per second of the result.
    """

    def __init__(self, rate: int, wanted: int) -> None:
        common = math.gcd(rate, wanted)
        self._up, self._down = wanted // common, rate // common
        cutoff = min(1.0, wanted / rate)
        self._half = math.ceil(TAPS / cutoff)
        self._phases = self._up if self._up <= PHASES else PHASES
        self._kernels = _kernels(self._phases, cutoff, self._half)
        self._inputs = np.zeros(self._half, np.float32)
        self._first = -self._half
        """Place of the first kept input sample; those before the beginning are 0."""
        self._num_outputs = 0

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Read samples, float32 of shape (samples,), and return the next ones of the result."""
        self._inputs = np.concatenate([self._inputs, samples])
        return self._written(self._first + len(self._inputs) - self._half - 1)

    def finish(self) -> np.ndarray:
        """Return the last samples of the result."""
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
            found = np.einsum("ij,ij->i", inputs, self._kernels[phase])
            if rest.any():
                share = (rest / self._up).astype(np.float32)
                found += share * (np.einsum("ij,ij->i", inputs, self._kernels[phase + 1]) - found)
            result[start : start + step] = found
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
    weights: np.ndarray = (kernels / kernels.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights
