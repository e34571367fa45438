"""Rotary positions of heads: tables of cosines and sines that grow with the positions that are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError

FIRST_LENGTH = 1024


@final
class Rotary:
    """Rotary positions with the parameters of a configuration of transformers.

    Args:
        rope: `rope_type`, `rope_theta` and the parameters of scaling.
        head_dim: width of an attention head.
        max_length: number of positions that the head was trained for.

    Raises:
        ModelLoadError: the type is not supported, or a parameter is missing or wrong.
    """

    def __init__(self, rope: Mapping[str, Any], head_dim: int, max_length: int) -> None:
        kind = rope.get("rope_type", "default")
        if kind not in _FORMULAS:
            known = ", ".join(_FORMULAS)
            raise ModelLoadError(f"head: rotary positions of type '{kind}' are not supported: {known} are")
        self._frequencies, self._scaling = _frequencies(rope, head_dim, max_length)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Radians per position for each pair of numbers."""
        return tuple(self._frequencies.tolist())

    @property
    def scaling(self) -> float:
        """Factor of cosines and sines."""
        return self._scaling

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of at least the positions below `length`.

        Args:
            length: number of positions.
            like: tensor whose device and dtype the tables have.

        Returns:
            Both of shape (positions, head_dim). The first half of the sines is negative, as `rotate` needs it.
        """
        key = (like.device, like.dtype)
        found = self._tables.get(key)
        if found is None or found[0].shape[0] < length:
            found = self._tables[key] = self._made(max(FIRST_LENGTH, 2 * length), like)
        return found

    def _made(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # tensors of inference mode could not be used in training later
        with torch.inference_mode(False), torch.no_grad():
            angles = torch.arange(length, dtype=torch.float64)[:, None] * self._frequencies.double()[None]
            cosines, sines = angles.cos() * self._scaling, angles.sin() * self._scaling
            both = torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)
            first, second = (table.to(like.device, like.dtype) for table in both)
            return first, second


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return rotated queries or keys.

    Args:
        states: shape (..., rows, heads, head_dim).
        cosines: of the rows, shape (..., rows, 1, head_dim).
        sines: as `cosines`, from `Rotary.tables`.
    """
    half = states.shape[-1] // 2
    return states * cosines + states.roll(half, dims=-1) * sines


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotation of the queries and keys of some rows.

    Attributes:
        cosines: of the rows, shape (..., rows, 1, head_dim).
        sines: as `cosines`.
    """

    cosines: Tensor
    sines: Tensor

    def __call__(self, states: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return rotated queries or keys of all rows, or of some, given by their indices."""
        if rows is None:
            return rotate(states, self.cosines, self.sines)
        return rotate(states, self.cosines.index_select(-3, rows), self.sines.index_select(-3, rows))


def _frequencies(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Return radians per position for each pair of numbers, float32, and the factor of cosines and sines."""
    try:
        # a head may be built on the meta device, and is filled later
        with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            frequencies, scaling = _FORMULAS[rope.get("rope_type", "default")](rope, head_dim, max_length)
            if not (frequencies.isfinite().all() and math.isfinite(scaling)):
                raise ValueError("a frequency is infinite or undefined")
            return frequencies, scaling
    except (KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as reason:
        raise ModelLoadError(f"head: its rotary positions {dict(rope)} cannot be used: {reason!r}") from reason


# The operations below have the order of those in transformers, so that the frequencies have the same bits.


def _wavelengths(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Return positions per radian without scaling: theta^(2i / d)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return rope.get("rope_theta", 10000.0) ** exponents


def _default(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope, head_dim), 1.0


def _linear(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope, head_dim) / rope["factor"], 1.0


def _llama3(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Divide low frequencies by the factor, keep high ones, and interpolate those between.

    Source: Llama 3.1, `apply_scaling` of its reference code.
    """
    frequencies, factor = 1.0 / _wavelengths(rope, head_dim), rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    trained = rope.get("original_max_position_embeddings", max_length)
    periods = 2 * math.pi / frequencies
    divided = torch.where(periods > trained / low, frequencies / factor, frequencies)
    weight = (trained / periods - low) / (high - low)
    between = (periods >= trained / high) & (periods <= trained / low)
    return torch.where(between, (1 - weight) * divided / factor + weight * divided, divided), 1.0


def _yarn(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Divide low frequencies by the factor, with a linear ramp to high ones, which are kept.

    Source: YaRN, arXiv 2309.00071: `beta_fast` and `beta_slow` are its beta and alpha, `scaling` its sqrt(1 / t).
    """
    trained = rope.get("original_max_position_embeddings", max_length)
    factor = max_length / trained if rope["factor"] is None else rope["factor"]
    wavelengths = _wavelengths(rope, head_dim)

    def index_with(rotations: float) -> float:
        """Return the (real) index of the number that rotates so often within the trained length."""
        theta = rope.get("rope_theta", 10000.0)
        return (head_dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    first, last = index_with(rope.get("beta_fast") or 32), index_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    scaling = rope.get("attention_factor")
    return frequencies, float(_yarn_scaling(rope, factor) if scaling is None else scaling)


def _yarn_scaling(rope: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1)


def _longrope(rope: Mapping[str, Any], head_dim: int, max_length: int) -> tuple[Tensor, float]:
    """Divide each frequency by its own factor for texts of the trained length.

    Source: LongRoPE, arXiv 2402.13753.
    """
    trained = rope.get("original_max_position_embeddings", max_length)
    factors = torch.tensor(rope["short_factor"], dtype=torch.float32)
    if factors.shape != (head_dim // 2,):
        raise ValueError(f"short_factor has {factors.numel()} numbers instead of {head_dim // 2}")
    frequencies = 1.0 / (factors * _wavelengths(rope, head_dim))
    scaling, factor = rope.get("attention_factor"), rope.get("factor")
    if scaling is None:
        factor = max_length / trained if factor is None else factor
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return frequencies, float(scaling)


_FORMULAS: Mapping[str, Callable[[Mapping[str, Any], int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Types of rotary positions whose frequencies do not depend on the length of a text."""
