"""Interface of packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from draftree.models.native.structures import CDecoder


class PackedSource(Protocol):
    """Packed weights of one model, in the structures of the C library."""

    decoder: CDecoder
    """Structure of the model."""
    layers: Any
    """Array of the structures of its layers, whose keys and values passes set."""

    @property
    def biases(self) -> Sequence[Tensor]:
        """Score biases by distance, shape (heads, distances)."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size in memory in bytes."""
        ...

    def at(self, place: int | None) -> Tensor | None:
        """Return the tensor at an address; None for no address."""
        ...

    def product(self, layer: int, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the packed blocks of a layer's product, and the scales of int8 blocks."""
        ...
