"""Cache object for the passes of a decoder: it stores nothing and skips the projection of the source.

transformers' cross-attentions project the encoder's output unless the cache they are given holds their keys. This one
holds one position of zeros for each layer, which our attention replaces by the keys of each row's source.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def empty_cache(shapes: dict[int, tuple[int, int, int]], *, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the cache.

    Args:
        shapes: heads, key size and value size of each layer's cross-attention.
        dtype: dtype of keys and values.
        device: device of keys and values.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    class PassedThrough(DynamicCache):
        """Self-attention: keys and values are returned unchanged."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return query_length, 0

    cross = DynamicCache()
    for layer, (heads, key_dim, value_dim) in sorted(shapes.items()):
        keys, values = (torch.zeros(1, heads, 1, size, dtype=dtype, device=device) for size in (key_dim, value_dim))
        cross.update(keys, values, layer)
    cache = EncoderDecoderCache(PassedThrough(), cross)
    assert all(cache.is_updated.get(layer) for layer in shapes), "no layer projects the encoder's output"
    return cache
