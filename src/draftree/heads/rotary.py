"""Rotary positions of heads: tables of cosines and sines that grow with the positions that are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError

FIRST_LENGTH = 1024
KNOWN = ("default", "linear", "llama3", "yarn", "longrope")
"""Types of rotary positions whose frequencies do not depend on the length of a text."""


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
        if kind not in KNOWN:
            raise ModelLoadError(f"head: rotary positions of type '{kind}' are not supported: {', '.join(KNOWN)} are")
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
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        # a head may be built on the meta device, and is filled later
        with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_length,
                rope_parameters={"rope_theta": 10000.0, **rope},
            )
            embedding = LlamaRotaryEmbedding(config)
            return embedding.inv_freq.float().clone(), float(embedding.attention_scaling)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as reason:
        raise ModelLoadError(f"head: its rotary positions {dict(rope)} cannot be used: {reason!r}") from reason
