"""Encoder of a model of transformers, and the keys and values of sources in the layout of the C library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.native.library import LANES
from draftree.models.source import Source
from draftree.models.torch.seq2seq.sources import encoder_input


@dataclass(slots=True, eq=False)
class NativeSource:
    """Keys and values of a source for all layers (layout: `csrc/attention_source.h`).

    Attributes:
        source: the source.
        memory: shape (layers, 2, heads, padded length, head_dim); keys of 16 positions are transposed.
        length: number of positions.
        num_slots: number of slots that refer to it.
    """

    source: Source
    memory: Tensor
    length: int
    num_slots: int = 0

    def last_keys(self) -> Tensor:
        """Return the keys of the last layer, float32 of shape (heads, length, head_dim)."""
        found = self.memory[-1, 0].float()
        heads, padded, dim = found.shape
        rows = found.view(heads, padded // LANES, dim, LANES).transpose(2, 3)
        return rows.reshape(heads, padded, dim)[:, : self.length]


@dataclass(frozen=True, slots=True, eq=False)
class SourceEncoder:
    """What runs once for each source, through torch.

    Attributes:
        encoder: the encoder.
        products: products of keys and of values of each layer.
        heads: number of their heads.
        device: device of the encoder.
        dtype: dtype of the encoder.
    """

    encoder: Any
    products: Sequence[tuple[nn.Linear, nn.Linear]]
    heads: int
    device: torch.device
    dtype: torch.dtype

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters."""
        found = [*self.encoder.parameters()]
        return found + [parameter for pair in self.products for linear in pair for parameter in linear.parameters()]

    @property
    def num_bytes(self) -> int:
        """Memory of the weights in bytes."""
        unique = {id(parameter): parameter for parameter in self.parameters}
        return sum(parameter.numel() * parameter.element_size() for parameter in unique.values())

    @torch.inference_mode()
    def hidden(self, source: Source) -> Tensor:
        """Return the encoder's output, shape (1, length, features)."""
        given = encoder_input(source, self.device, self.dtype)
        found: Tensor = self.encoder(given, return_dict=True).last_hidden_state
        return found

    @torch.inference_mode()
    def keys_values(self, source: Source, hidden: Tensor) -> NativeSource:
        """Return the keys and values of a source, from the encoder's output."""
        length = hidden.shape[1]
        padding = -length % LANES
        layers = []
        for pair in self.products:
            both = [F.linear(hidden[0], linear.weight, linear.bias) for linear in pair]
            keys, values = (F.pad(one.view(length, self.heads, -1).transpose(0, 1), (0, 0, 0, padding)) for one in both)
            heads, padded, dim = keys.shape
            keys = keys.reshape(heads, padded // LANES, LANES, dim).transpose(2, 3).reshape(heads, padded, dim)
            layers.append(torch.stack([keys, values]))
        return NativeSource(source, torch.stack(layers).contiguous(), length)
