"""Seconds of a pass by sequences, rows and tokens before them: measured, or from data sheets. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, final

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, read_json_lines


class PassCurve(Protocol):
    """Cost of passes."""

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        """Return the seconds of a pass.

        Args:
            batch: sequences with rows in the pass.
            rows: rows of all sequences together.
            prefix: mean number of tokens before the rows of a sequence.
            prompt_rows: of these rows, those that only read a prompt and need no logits.
        """
        ...


@final
class MeasuredCurve:
    """Interpolation between measured passes: points of (sequences, rows of each, tokens before them, seconds).

    A pass over one sequence is interpolated by its rows; a pass of one row per sequence by its sequences. A pass
    between these is a mean of both, weighted by the share of rows that begin another sequence, times a correction from
    measured passes of several rows in several sequences, interpolated by sequences and by rows of each. Tokens before
    the rows add a measured slope per sequence: a part for reading keys and values (`token_share`: bytes of a token's
    keys and values divided by those of all weights; 0 if unknown), and a part in proportion to the rows. Rows that only
    read a prompt add what they cost in a pass of their own (`prompts`: seconds by tokens) beyond a pass of one row;
    without such passes they cost as others.
    """

    def __init__(
        self,
        points: Iterable[tuple[int, int, int, float]],
        *,
        token_share: float = 0.0,
        prompts: Mapping[int, float] | None = None,
    ) -> None:
        points = list(points)
        start = next((point for point in points if point[:2] == (1, 1)), None)
        if start is None:
            raise ConfigurationError("the curve has no pass of one sequence and one row: measure one")
        self._prefix, self._one = start[2], start[3]
        same = [point for point in points if point[2] == self._prefix]
        self._of_rows = {rows: seconds for batch, rows, _, seconds in same if batch == 1}
        self._of_batch = {batch: seconds for batch, rows, _, seconds in same if rows == 1}
        alone = [point for point in points if point[0] == 1]
        self._slope = _slope(alone, self._prefix)
        self._reading = min(self._slope, token_share * start[3])
        self._slope_rows = max((point[1] for point in alone if point[2] != self._prefix), default=1)
        self._prompts = dict(prompts or {})
        corrections: dict[int, dict[int, float]] = {1: {1: 1.0}}
        for batch, rows, _, seconds in same:
            if batch > 1 and rows > 1:
                corrections.setdefault(rows, {1: 1.0})[batch] = seconds / self._estimate(batch, batch * rows)
        self._corrections = corrections

    @classmethod
    def read(cls, path: Path, *, token_share: float | None = None) -> MeasuredCurve:
        """Read a file of `benchmarks/load.py --scenario costs` or `benchmarks/scale/fleet.py`; medians count."""
        points = []
        prompts = dict[int, float]()
        share = 0.0
        try:
            for row in read_json_lines(path):
                share = float(row.get("token_share", share))
                if {"batch", "prefix", "rows", "milliseconds"} <= row.keys():
                    seconds = statistics.median(row["milliseconds"]) / 1000
                    points.append((int(row["batch"]), int(row["rows"]), int(row["prefix"]), seconds))
                elif {"prompt_rows", "milliseconds"} <= row.keys():
                    prompts[int(row["prompt_rows"])] = statistics.median(row["milliseconds"]) / 1000
        except FileNotFoundError as error:
            raise ConfigurationError(f"'{path}' does not exist: check the path") from error
        except MALFORMED as error:
            raise ConfigurationError(f"'{path}' cannot be read as measurements: {error}") from error
        if not points:
            raise ConfigurationError(
                f"'{path}' has no measured passes: write it by benchmarks/load.py --scenario costs"
            )
        return cls(points, token_share=share if token_share is None else token_share, prompts=prompts)

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        """Return the seconds of a pass."""
        if not self._prompts:
            prompt_rows = 0
        prompt = between(self._prompts, prompt_rows) if prompt_rows else 0.0
        rows -= prompt_rows
        if not rows:
            return max(1e-9, prompt)
        batch = min(batch, rows)
        each = rows / batch
        by_rows = (self._slope - self._reading) * min(1.0, each / self._slope_rows)
        before = batch * (self._reading + by_rows) * (prefix - self._prefix)
        at = {count: within(factors, batch) for count, factors in self._corrections.items()}
        alone = self._estimate(batch, rows) * within(at, each)
        return max(1e-9, alone + before + (max(0.0, prompt - self._one) if prompt_rows else 0.0))

    def _estimate(self, batch: int, rows: int) -> float:
        """Return the seconds from passes of one sequence and passes of one row of each."""
        share = 0.0 if rows <= 1 else (batch - 1) / (rows - 1)
        return (1 - share) * between(self._of_rows, rows) + share * between(self._of_batch, rows)


def within(points: Mapping[int, float], place: float) -> float:
    """Interpolate linearly between ascending places; constant outside of them."""
    return between(points, min(max(place, min(points)), max(points)))


def between(points: Mapping[int, float], place: float) -> float:
    """Interpolate linearly between ascending places; beyond the last by the slope of the last two."""
    known = sorted(points)
    if place <= known[0] or len(known) == 1:
        return points[known[0]]
    low, high = next(((a, b) for a, b in pairwise(known) if place <= b), (known[-2], known[-1]))
    return points[low] + (points[high] - points[low]) * (place - low) / (high - low)


def _slope(points: Sequence[tuple[int, int, int, float]], usual: int) -> float:
    """Return seconds per token before the rows, from passes of one sequence that differ only in it; 0 if unknown."""
    slopes = []
    for _, rows, prefix, seconds in points:
        base = next((other[3] for other in points if other[1] == rows and other[2] == usual), None)
        if prefix != usual and base is not None:
            slopes.append((seconds - base) / (prefix - usual))
    return max(0.0, statistics.median(slopes)) if slopes else 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """A processor by its data sheet.

    Attributes:
        flops: dense 16-bit operations per second.
        link: bytes per second to the devices of the same machine, one direction.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float


DEVICES = {
    device.name: device
    for device in (
        Device("h200", 141e9, 4.8e12, 989e12, 450e9),
        Device("h100", 80e9, 3.35e12, 989e12, 450e9),
        Device("a100", 80e9, 2.04e12, 312e12, 300e9),
        Device("l40s", 48e9, 0.864e12, 362e12, 32e9),
        Device("l4", 24e9, 0.3e12, 121e12, 32e9),
        Device("rtx4090", 24e9, 1.008e12, 165e12, 32e9),
    )
}
"""Data sheets of the vendors: 16-bit operations without sparsity."""
OVERHEAD = 1.5e-3
"""Seconds per step of the host: planning, verification, launches."""
REACHED_BANDWIDTH, REACHED_FLOPS = 0.7, 0.5
"""Shares of the data sheet that passes usually reach. Assumptions, not measurements."""
MESSAGE_SECONDS = 15e-6
"""Latency of one all-reduce."""


@dataclass(frozen=True, slots=True)
class RooflineCurve:
    """Bound of a pass by bandwidth or arithmetic, whichever is larger, on one or several devices.

    A tensor-parallel pass sums twice per layer: the latency of a message, and twice the bytes of the rows' activations
    over the link.

    Attributes:
        token_bytes: keys and values of one token.
    """

    device: Device
    num_devices: int
    parameters: float
    weight_bytes: float
    token_bytes: float
    layers: int
    hidden: int

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        """Return the seconds of a pass."""
        read = self.weight_bytes + batch * prefix * self.token_bytes
        memory = read / self.num_devices / (REACHED_BANDWIDTH * self.device.bandwidth)
        work = 2 * self.parameters * rows / self.num_devices / (REACHED_FLOPS * self.device.flops)
        if self.num_devices == 1:
            return max(memory, work)
        moved = 2 * rows * self.hidden * 2 * (self.num_devices - 1) / self.num_devices
        return max(memory, work) + 2 * self.layers * (MESSAGE_SECONDS + moved / self.device.link)
