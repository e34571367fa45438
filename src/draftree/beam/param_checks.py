"""Checks of the parameters of a beam search that `sampling/param_checks.py` does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from draftree.beam.trie import TokenTrie
from draftree.sampling.param_checks import Number, TokenIds, refuse, require_length

MAX_PHRASES = 4096

_BOUND = Number(-1e6, 1e6, "four numbers min_a, min_b, max_a, max_b")


def one_of(values: Sequence[Any]) -> Callable[[str, Any], Any]:
    """Return a check for one of these values."""

    def check(name: str, value: Any) -> Any:
        for allowed in values:
            if type(value) is type(allowed) and value == allowed:
                return allowed
        raise refuse(name, value, "one of " + ", ".join(map(repr, values)))

    return check


def flag(name: str, value: Any) -> bool:
    """Check for a bool."""
    if not isinstance(value, bool | np.bool_):
        raise refuse(name, value, "True or False")
    return bool(value)


def phrases(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Check for a list of lists of token ids, none empty."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise refuse(name, value, "a list of phrases, each a list of at least one token id")
    require_length(name, value, MAX_PHRASES, "phrases")
    found = tuple(map(partial(TokenIds(), name), value))
    if not all(found):
        raise refuse(name, value, "a list of phrases, each a list of at least one token id")
    return found


def prefix_function(name: str, value: Any) -> Any:
    """Check for a function or None."""
    if value is not None and not callable(value):
        raise refuse(name, value, "a function of the prompt's index and the tokens so far")
    return value


def allowed_trie(name: str, value: Any) -> TokenTrie | None:
    """Check for a trie or None."""
    if value is not None and not isinstance(value, TokenTrie):
        raise refuse(name, value, "a TokenTrie")
    return value


def length_bounds(name: str, value: Any) -> tuple[float, float, float, float] | None:
    """Check for four numbers, or None."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) != 4:
        raise refuse(name, value, "four numbers min_a, min_b, max_a, max_b")
    min_a, min_b, max_a, max_b = (_BOUND(name, item) for item in value)
    return (min_a, min_b, max_a, max_b)


def optional_model(name: str, value: Any) -> Any:
    """Check for a `LanguageModel` or None; of an `LLM` or a `LoadedModel` the model is taken."""
    if value is None:
        return None
    from draftree.models.base import LanguageModel  # here, so that the command line's help does not wait for torch

    for found in (value, getattr(value, "model", None)):
        if isinstance(found, LanguageModel):
            return found
    raise refuse(name, value, "an LLM or a LanguageModel")


def model_list(name: str, value: Any) -> tuple[Any, ...]:
    """Check for a list of models."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or any(item is None for item in value):
        raise refuse(name, value, "a list of LLMs or LanguageModels")
    return tuple(optional_model(name, item) for item in value)
