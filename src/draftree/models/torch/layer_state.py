"""State that a model's layers keep between tokens; models with more than keys and values are refused."""

from __future__ import annotations

import inspect
from typing import Any

from draftree.core.errors import UnsupportedModelError
from draftree.models.torch.cache_argument import accepts_cache

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Layer types whose state is the keys and values of each token."""
PLAIN_CACHES = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
"""Caches of such layers in transformers; the last one is for layers that read keys and values of other layers."""
INDEXED = "Indexed"
"""Substring in the names of caches with an index for sparse attention."""


def layer_types(config: Any) -> frozenset[str]:
    """Return the layer types in a text configuration; empty if it has none."""
    return frozenset(getattr(config, "layer_types", None) or ())


def refuse_state(model: Any) -> None:
    """Check that a model's state is the keys and values of each token.

    Raises:
        UnsupportedModelError: it has another state, or accepts no keys and values.
    """
    kind, config = type(model).__name__, model.config.get_text_config()
    kinds = layer_types(config)
    attends_only = bool(kinds) and kinds <= KNOWN_LAYER_TYPES
    recurrent = any(word in name for name in kinds for word in ("linear", "conv", "mamba", "recurrent"))
    if recurrent or (getattr(model, "_is_stateful", False) and not attends_only):
        raise UnsupportedModelError(
            f"{kind} keeps a recurrent state, which cannot be rolled back after a rejected draft: "
            "use a model whose layers all attend"
        )
    hides_arguments = "input_ids" not in inspect.signature(model.forward).parameters  # a wrapper with **kwargs
    if not hides_arguments and not accepts_cache(model.forward):
        raise UnsupportedModelError(
            f"{kind} accepts no stored keys and values, so each token would recompute the whole text: "
            "use a model whose forward accepts a cache"
        )
    strange = _caches(config) - PLAIN_CACHES
    if any(INDEXED in name for name in strange):
        raise UnsupportedModelError(
            f"{kind} chooses the tokens that it attends to by an index (sparse attention), which Draftree does not "
            "support: use a model that attends to all tokens or to a window"
        )
    if strange:
        raise UnsupportedModelError(
            f"{kind} keeps more than the keys and values of each token, which cannot be rolled back after a rejected "
            "draft: use a model whose layers all attend"
        )


def cache_windows(config: Any) -> dict[int, int]:
    """Return the sliding window in tokens of each layer for which `generate` keeps only the last keys and values."""
    layers = enumerate(_layers(config))
    return {place: int(layer.sliding_window) for place, layer in layers if getattr(layer, "is_sliding", False)}


def _caches(config: Any) -> frozenset[str]:
    """Return the class names of the caches that transformers creates for a text configuration."""
    return frozenset(type(layer).__name__ for layer in _layers(config))


def _layers(config: Any) -> list[Any]:
    from transformers import DynamicCache

    try:
        return list(DynamicCache(config=config).layers)
    except Exception:  # no configuration from which a cache can be created: the self-check decides
        return []
