"""What a model keeps from token to token: keys and values, which can be rolled back after a rejected draft, or more."""

from __future__ import annotations

import inspect
from typing import Any

from draftree.core.errors import UnsupportedModelError

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Layers that keep the keys and values of each token and nothing else."""
PLAIN_CACHES = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
"""What transformers keeps for such layers; the last one is nothing, for layers that read keys and values of others."""
INDEXED = "Indexed"
"""Part of the names of caches with an index for sparse attention."""


def layer_types(config: Any) -> frozenset[str]:
    """Kinds of layers that a text configuration names; empty where it names none."""
    return frozenset(getattr(config, "layer_types", None) or ())


def refuse_state(model: Any) -> None:
    """Raise where a model keeps more than keys and values of each token, or does not keep those.

    Raises:
        UnsupportedModelError: names what it keeps.
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
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" in parameters and "past_key_values" not in parameters:  # else a wrapper hides what it takes
        raise UnsupportedModelError(
            f"{kind} takes no stored keys and values, so each token would read the whole text again: "
            "use a model that takes past_key_values"
        )
    strange = _caches(config) - PLAIN_CACHES
    if any(INDEXED in name for name in strange):
        raise UnsupportedModelError(
            f"{kind} chooses the tokens that it attends to by an index (sparse attention), which Draftree does not "
            "keep: use a model that attends to all tokens or to a window"
        )
    if strange:
        raise UnsupportedModelError(
            f"{kind} keeps more than the keys and values of each token, which cannot be rolled back after a rejected "
            "draft: use a model whose layers all attend"
        )


def cache_windows(config: Any) -> dict[int, int]:
    """Layers of which `generate` keeps the last keys and values only, and how many tokens such a layer sees."""
    layers = enumerate(_layers(config))
    return {place: int(layer.sliding_window) for place, layer in layers if getattr(layer, "is_sliding", False)}


def _caches(config: Any) -> frozenset[str]:
    """Names of the kinds of caches that transformers makes for a text configuration."""
    return frozenset(type(layer).__name__ for layer in _layers(config))


def _layers(config: Any) -> list[Any]:
    from transformers import DynamicCache

    try:
        return list(DynamicCache(config=config).layers)
    except Exception:  # no settings that a cache is made from: the self-check decides
        return []
