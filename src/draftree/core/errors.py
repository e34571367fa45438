"""Every error that Draftree raises on purpose.

    DraftreeError
    ├── ConfigurationError (ValueError)     a method, option or combination that cannot be honoured
    │   └── VocabularyMismatchError         drafter and target do not share one vocabulary
    ├── InvalidRequestError (ValueError)    a prompt or sampling parameter that cannot be honoured
    ├── ModelError (RuntimeError)
    │   ├── ModelNotFoundError              no such name, folder, file or hub id
    │   ├── ModelLoadError                  found, but broken or unreadable
    │   └── UnsupportedModelError           read, but its kind cannot be decoded here
    ├── WeightsError (RuntimeError)         weights could not be fetched, checked or converted
    ├── QueueFullError (RuntimeError)       as many requests wait as may
    ├── EngineClosedError (RuntimeError)    the engine takes no requests any more
    └── GenerationError (RuntimeError)      a request failed while it was being written
        └── NonFiniteLogitsError            the model gave NaN, or no token was left to choose

A message has three parts: what was asked, what is the case, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from draftree.core.plain_text import harmless

__all__ = [
    "ConfigurationError",
    "DraftreeError",
    "EngineClosedError",
    "GenerationError",
    "InvalidRequestError",
    "ModelError",
    "ModelLoadError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "QueueFullError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "WeightsError",
    "suggestion",
]


class DraftreeError(Exception):
    """Base of all errors raised on purpose. What a message quotes is made safe to show on a terminal."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(harmless(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigurationError(DraftreeError, ValueError):
    """A method, an option or a combination that cannot be honoured."""


class MissingTokenizerError(ConfigurationError):
    """Two vocabularies differ, and a tokenizer that would tell how is missing."""


class VocabularyMismatchError(ConfigurationError):
    """Drafter and target do not share one vocabulary."""


class InvalidRequestError(DraftreeError, ValueError):
    """A prompt or a sampling parameter that cannot be honoured."""


class ModelError(DraftreeError, RuntimeError):
    """A model that cannot be had or used."""


class ModelNotFoundError(ModelError):
    """No such name, folder, file or hub id."""


class ModelLoadError(ModelError):
    """The model was found, but is broken or unreadable."""


class UnsupportedModelError(ModelError):
    """The model was read, but its kind cannot be decoded here."""


class WeightsError(DraftreeError, RuntimeError):
    """Weights could not be fetched, checked or converted."""


class QueueFullError(DraftreeError, RuntimeError):
    """As many requests wait as may: come back later."""


class EngineClosedError(DraftreeError, RuntimeError):
    """The engine was closed, or broke down: it takes no requests any more."""


class GenerationError(DraftreeError, RuntimeError):
    """A request failed while it was being written.

    Attributes:
        completions: what the other requests of the batch gave.
    """

    def __init__(self, message: str, completions: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.completions = list(completions)


class NonFiniteLogitsError(GenerationError):
    """The model gave NaN or infinite logits, or the sampling controls left no token."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known word, or all of them: the last part of an error message."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'? (known: {', '.join(names)})"
    return f"known: {', '.join(names)}"
