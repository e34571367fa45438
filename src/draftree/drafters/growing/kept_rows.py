"""Keys and values that a head keeps for one text, and attention of a pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

FIRST_ROWS = 64
"""Rows for which memory is reserved at first; it doubles when it is full."""


@final
class KeptRows:
    """Keys and values of the context rows of one text, for every layer of a head. Mutated by `BlockPass`."""

    def __init__(self) -> None:
        self.length = 0
        """Number of rows in every layer."""
        self._layers: list[tuple[Tensor, Tensor]] = []

    def add(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write rows of a layer after the kept ones. They count once `length` is increased.

        Args:
            layer: index of the layer; layers are first written in order.
            key: shape (rows, kv_heads, head_dim).
            value: shape of `key`.
        """
        end = self.length + len(key)
        if layer == len(self._layers):
            self._layers.append((_room(key, max(end, FIRST_ROWS)), _room(value, max(end, FIRST_ROWS))))
        elif end > self._layers[layer][0].shape[1]:
            size = max(end, 2 * self._layers[layer][0].shape[1])
            self._layers[layer] = tuple(_grown(part, size, self.length) for part in self._layers[layer])  # type: ignore[assignment]
        for part, rows in zip(self._layers[layer], (key, value), strict=True):
            part[:, self.length : end] = rows.transpose(0, 1)

    def rows(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first rows, shape (kv_heads, rows, head_dim); views."""
        key, value = self._layers[layer]
        return key[:, :end], value[:, :end]

    def copy(self, length: int) -> KeptRows:
        """Return a copy of the first rows."""
        found = KeptRows()
        found.length = min(length, self.length)
        size = max(found.length, FIRST_ROWS)
        found._layers = [tuple(_grown(part, size, found.length) for part in parts) for parts in self._layers]  # type: ignore[misc]
        return found


@final
class BlockPass:
    """Attention of one pass, as in `BlockAttend`.

    Args:
        kept: rows of each text.
        counts: new context rows of each text.
    """

    def __init__(self, kept: Sequence[KeptRows], counts: Sequence[int]) -> None:
        self._kept, self._counts = kept, counts

    def context(
        self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, *, window: int = 0
    ) -> Tensor | None:
        """Keep rows; attend to them causally."""
        mixed, first = [], 0
        for kept, count in zip(self._kept, self._counts, strict=True):
            part = slice(first, first + count)
            first += count
            kept.add(layer, key[part], value[part])
            if query is not None:
                keys, values = kept.rows(layer, kept.length + count)
                places = torch.arange(kept.length, kept.length + count, device=key.device)
                mask = _visible(places, kept.length + count, is_causal=True, window=window)
                mixed.append(_attend(query[part], keys, values, mask))
        return torch.cat(mixed) if mixed else None

    def block(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int = 0
    ) -> Tensor:
        """Attend from blocks to the rows of their text and to themselves."""
        mixed = []
        for text, (kept, count) in enumerate(zip(self._kept, self._counts, strict=True)):
            keys, values = kept.rows(layer, kept.length + count)
            total = keys.shape[1] + query.shape[1]
            places = torch.arange(keys.shape[1], total, device=key.device)
            mask = _visible(places, total, is_causal=is_causal, window=window) if is_causal or window else None
            both = torch.cat((keys, key[text].transpose(0, 1)), 1), torch.cat((values, value[text].transpose(0, 1)), 1)
            mixed.append(_attend(query[text], *both, mask))
        return torch.stack(mixed)

    def finish(self) -> None:
        """Count the new rows of all texts, which every layer has written."""
        for kept, count in zip(self._kept, self._counts, strict=True):
            kept.length += count


def _room(rows: Tensor, size: int) -> Tensor:
    return rows.new_empty(rows.shape[1], size, rows.shape[2])


def _grown(part: Tensor, size: int, used: int) -> Tensor:
    found = part.new_empty(part.shape[0], size, part.shape[2])
    found[:, :used] = part[:, :used]
    return found


def _visible(places: Tensor, length: int, *, is_causal: bool, window: int) -> Tensor:
    """Return which keys rows see, shape (rows, keys), bool; row and key i are at place i of the text."""
    ahead = torch.arange(length, device=places.device)[None] - places[:, None]
    seen = ahead <= 0 if is_causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if not window else seen & (ahead.abs() < window)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return shape (rows, heads, head_dim), from queries of that shape and keys (kv_heads, length, head_dim)."""
    mixed = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)
