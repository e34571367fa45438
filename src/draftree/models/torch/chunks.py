"""A prompt with images in chunks: the model computes all embeddings at once, and its text decoder reads some at a time.

The decoder sees in each chunk what it would see in one pass: positions, masks and states are those of the whole prompt.
A chunk ends only where no token before its end sees one after it, so never within an image whose tokens see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftree.models.torch.inspection import CACHE_NAMES, cache_name, cache_windows
from draftree.models.torch.recurrent import keeps_states, replaced_forward

ROWS = 512  # tokens of a chunk, unless it has to end later
DEEP = "deepstack_visual_embeds"
"""Argument with features of all images that some layers add, one row for each True of the argument `PLACES`."""
PLACES = "visual_pos_masks"


@contextmanager
def read_in_chunks(model: Any) -> Iterator[None]:
    """Let a model's text decoder read the embeddings of one long prompt in chunks; it returns the last one's output."""
    decoder = model.get_decoder()
    forward = decoder.forward

    def read(*args: Any, **named: Any) -> Any:
        embeddings = named.get("inputs_embeds")
        if args or embeddings is None or embeddings.shape[0] != 1 or embeddings.shape[1] <= ROWS:
            return forward(*args, **named)
        length = embeddings.shape[1]
        masks = [value for value in _tensors(named.get("attention_mask")) if value.dim() == 4]
        cache = _cache(decoder, has_masks=bool(masks))
        try:
            chunks = [] if cache is None else [_part(named, length, *ends) for ends in _ends(masks, length)]
        except _UnknownTensorError:
            chunks = []
        if not chunks:
            return forward(**named)
        for chunk in chunks:
            output = forward(**chunk, **{cache_name(forward): cache, "use_cache": True})
        return output

    with replaced_forward(decoder, read):
        yield


def _cache(decoder: Any, *, has_masks: bool) -> Any:
    """Return a cache that keeps the keys and values of every token; None if there is none for this decoder."""
    from transformers import DynamicCache

    if not keeps_states(decoder.config):
        return DynamicCache()
    return None if has_masks or cache_windows(decoder.config) else DynamicCache(config=decoder.config)


def _ends(masks: list[Tensor], length: int) -> Iterator[tuple[int, int]]:
    """Yield the first token of each chunk, and its end."""
    first = 0
    while first < length:
        end = min(first + ROWS, length)
        while later := max((_seen_after(mask, end) for mask in masks), default=0):
            end += later
        yield first, end
        first = end


def _seen_after(mask: Tensor, end: int) -> int:
    """Return how many tokens from `end` on are needed for those before it."""
    block = mask[..., :end, end:]
    seen = (block if block.dtype == torch.bool else block == 0).flatten(0, -2).any(0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 0


class _UnknownTensorError(Exception):
    """It is unknown to which tokens an argument belongs."""


def _part(named: Mapping[str, Any], length: int, first: int, end: int) -> dict[str, Any]:
    """Return the arguments for some of the tokens, without cache."""
    chosen = {name: value for name, value in named.items() if name not in (*CACHE_NAMES, "use_cache")}
    deep = {}
    if chosen.get(PLACES) is not None and chosen.get(DEEP) is not None:
        before, until = (int(chosen[PLACES][:, :stop].sum()) for stop in (first, end))
        deep[DEEP] = [features[before:until] for features in chosen.pop(DEEP)]
    return {name: _cut(name, value, length, first, end) for name, value in chosen.items()} | deep


def _cut(name: str, value: Any, length: int, first: int, end: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(name, each, length, first, end) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cut(name, each, length, first, end) for each in value)
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 4 and value.shape[-2:] == (length, length):
        return value[..., first:end, :end]
    if name == "attention_mask" and value.shape == (1, length):
        return value[:, :end]
    if value.shape[:2] == (1, length):
        return value[:, first:end]
    if value.shape[-1] == length:
        return value[..., first:end]
    raise _UnknownTensorError


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, Tensor):
        yield value
