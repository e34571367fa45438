"""Caches of transformers' families, whatever they hold: created, copied, taken apart by rows, cut to a prefix.

Keys and values grow by concatenation, so copies share them; recurrent states are changed in place, so copies own them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.torch.inspection import PLAIN_CACHES, cache_layers

INDEXED = frozenset({"DynamicIndexedLayer", "MiniMaxM3VLSparseCacheLayer"})
"""Layers of transformers' caches with the keys of an index beside keys and values, all of each token."""

IN_BLOCKS = frozenset({"DeepseekV4HCACache", "DeepseekV4CSACache", "MiniMaxM3VLSparseCacheLayer"})
"""Layers that take tokens in blocks, padding included."""


def refuse_padding(model: Any) -> None:
    """Raise for a model whose text after padding depends on how many tokens each pass reads."""
    if any(type(layer).__name__ in IN_BLOCKS for layer in cache_layers(model.config.get_text_config())):
        raise UnsupportedModelError(
            f"{type(model).__name__} takes tokens in blocks that padding shifts, and a pass over one token then sees "
            "other blocks than a longer one: give prompts of one length"
        )


def is_cropped(model: Any) -> bool:
    """Return whether rejected tokens can be cut off the cache of a model."""
    kinds = {type(layer).__name__ for layer in cache_layers(model.config.get_text_config())}
    return _takes_dynamic_cache(model) and kinds <= PLAIN_CACHES | INDEXED and (bool(kinds) or not _is_stateful(model))


def new_cache(model: Any) -> Any:
    """Return an empty cache; None if the model creates its own in its first pass."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if not _takes_dynamic_cache(model):
        return None
    config = model.config.get_text_config()
    layers = cache_layers(config)
    if not is_cropped(model):
        return DynamicCache(config=config)
    if all(type(layer).__name__ in PLAIN_CACHES for layer in layers):
        return DynamicCache()  # without the configuration no layer drops keys, which could not be restored
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if getattr(layer, "is_sliding", False) else layer for layer in cache.layers]
    return cache


def _takes_dynamic_cache(model: Any) -> bool:
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    return supports is None or bool(supports())


def _is_stateful(model: Any) -> bool:
    return bool(getattr(model, "_is_stateful", False))


def copied(cache: Any) -> Any:
    """Return a copy that shares the keys and values, which no pass changes in place."""
    return copy.deepcopy(cache, {id(tensor): tensor for layer in _growing(cache) for tensor in _contents(layer)})


def without_keys(cache: Any) -> Any:
    """Return a copy without what `with_keys_of` cuts from a later cache of the same text."""
    kept = copied(cache)
    for layer in _sliceable(kept):
        if layer.keys is not None:
            layer.keys, layer.values = layer.keys[..., :0, :].clone(), layer.values[..., :0, :].clone()
    return kept


def with_keys_of(kept: Any, later: Any, length: int) -> Any:
    """Return a copy of a cache `without_keys`, with the first `length` keys and values of a later one."""
    restored = copied(kept)
    for layer, source in zip(_sliceable(restored), _sliceable(later), strict=True):
        if layer.keys is not None:
            layer.keys, layer.values = source.keys[..., :length, :], source.values[..., :length, :]
    return restored


def has_keys(cache: Any) -> bool:
    return any(layer.keys is not None for layer in _growing(cache))


def _growing(cache: Any) -> Iterator[Any]:
    from transformers.cache_utils import DynamicLayer

    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, DynamicLayer):
            yield layer


def _contents(layer: Any) -> Iterator[Tensor]:
    for tensor in (layer.keys, layer.values):
        if isinstance(tensor, Tensor):
            yield tensor


def _sliceable(cache: Any) -> Iterator[Any]:
    """Yield the layers that keep every key; those with an index of their own are kept whole."""
    for layer in _growing(cache):
        if not layer.is_sliding and type(layer).__name__ not in INDEXED:
            yield layer


def row_of(cache: Any, row: int) -> Any:
    """Return a copy of one row of a batch."""
    taken = copied(cache)
    for layer in getattr(taken, "layers", ()):
        device = next((tensor.device for tensor in tensors_of(layer)), torch.device("cpu"))
        layer.reorder_cache(torch.tensor([row], device=device))
    return _mapped(taken, lambda tensor: tensor[row : row + 1].clone() if tensor.dim() > 1 else tensor)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested containers with all tensors changed, but those of a cache's layers."""
    match value:
        case Tensor():
            return change(value)
        case list() | tuple():
            return type(value)(_mapped(item, change) for item in value)
        case dict():
            return {key: _mapped(item, change) for key, item in value.items()}
    if type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            if name not in ("layers", "config"):
                setattr(value, name, _mapped(item, change))
    return value


def num_bytes(cache: Any) -> int:
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors_of(cache)}.values())


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers and objects of transformers."""
    match value:
        case Tensor():
            yield value
        case list() | tuple():
            for item in value:
                yield from tensors_of(item)
        case dict():
            for item in value.values():
                yield from tensors_of(item)
        case _ if type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
            for name, item in vars(value).items():
                if name != "config":
                    yield from tensors_of(item)
