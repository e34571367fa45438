"""Name of the argument by which a model takes its stored keys and values.

transformers calls it `cache` from version 5.24 on and `past_key_values` before. A model's own code may use the other
name, so the signature decides. The old name still works in 5.24, but raises a warning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")


def accepts_cache(function: Callable[..., Any]) -> bool:
    """Return whether a function has an argument for stored keys and values."""
    return not inspect.signature(function).parameters.keys().isdisjoint(CACHE_NAMES)


def cache_name(function: Callable[..., Any]) -> str:
    """Return the name of a function's argument for stored keys and values; transformers' name if **kwargs hides it."""
    from transformers import GenerationMixin

    shown = function if accepts_cache(function) else GenerationMixin.prepare_inputs_for_generation
    parameters = inspect.signature(shown).parameters
    return next(name for name in CACHE_NAMES if name in parameters)
