"""The exceptions that Draftree raises deliberately.

    DraftreeError
    ├── ConfigurationError (ValueError)     a method, option or combination that cannot be honoured
    │   └── VocabularyMismatchError         drafter and target do not share one vocabulary
    ├── InvalidRequestError (ValueError)    a prompt or sampling parameter that cannot be honoured
    │   └── TokenizerError                  the model's tokenizer fails on this text or these tokens
    ├── ModelError (RuntimeError)
    │   ├── ModelNotFoundError              no such name, folder, file or hub id
    │   ├── ModelLoadError                  found, but broken or unreadable
    │   └── UnsupportedModelError           readable, but its architecture is not supported
    ├── WeightsError (RuntimeError)         weights could not be fetched, checked or converted
    ├── QueueFullError (RuntimeError)       the waiting queue is full
    ├── EngineClosedError (RuntimeError)    the engine accepts no more requests
    ├── RankError (RuntimeError)            a process of a model that several compute together ended
    └── GenerationError (RuntimeError)      a request failed during generation
        └── NonFiniteLogitsError            NaN or infinite logits, or every token was filtered out

A message has three parts: the wrong value, the reason or the allowed values, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

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
    "PromptTooLongError",
    "QueueFullError",
    "RankError",
    "TokenizerError",
    "UnsatisfiableError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "WeightsError",
    "blaming",
    "suggestion",
]

MAX_WORD_CHARS = 64
"""Characters of a word for which a known one is suggested; the comparison takes quadratic time."""


class DraftreeError(Exception):
    """Base of all deliberate errors. Unsafe characters in a message are escaped, so that a terminal can show it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(harmless(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigurationError(DraftreeError, ValueError):
    """A method, an option or a combination that cannot be honoured."""


class MissingTokenizerError(ConfigurationError):
    """The vocabularies differ, and a tokenizer that is needed to map between them is missing."""


class VocabularyMismatchError(ConfigurationError):
    """Drafter and target do not share one vocabulary."""


class InvalidRequestError(DraftreeError, ValueError):
    """A prompt or a sampling parameter that cannot be honoured.

    Attributes:
        param: name of the argument or sampling parameter at fault; None if it is not known.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TokenizerError(InvalidRequestError):
    """The model's tokenizer fails on this text or these tokens."""


class PromptTooLongError(InvalidRequestError):
    """A prompt with more tokens than the model reads, or than are allowed."""


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Name the argument at fault in an `InvalidRequestError` of the block that names none."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = error.param or param
        raise


class ModelError(DraftreeError, RuntimeError):
    """A model cannot be found, loaded or used."""


class ModelNotFoundError(ModelError):
    """No such name, folder, file or hub id."""


class ModelLoadError(ModelError):
    """The model was found, but is broken or unreadable."""


class UnsupportedModelError(ModelError):
    """The model is readable, but its architecture is not supported."""


class WeightsError(DraftreeError, RuntimeError):
    """Weights could not be fetched, checked or converted."""


class QueueFullError(DraftreeError, RuntimeError):
    """The waiting queue is full; retry later."""


class EngineClosedError(DraftreeError, RuntimeError):
    """The engine was closed or failed; it accepts no more requests."""


class RankError(DraftreeError, RuntimeError):
    """A process of a model that several processes compute together ended or failed."""


class GenerationError(DraftreeError, RuntimeError):
    """A request failed during generation.

    Attributes:
        completions: results of the other requests of the batch.
    """

    def __init__(self, message: str, completions: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.completions = list(completions)


class NonFiniteLogitsError(GenerationError):
    """The model gave NaN or infinite logits."""


class UnsatisfiableError(GenerationError):
    """No text satisfies all controls of the request.

    Attributes:
        param: name of a control; None if it is not known.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the last part of an error message: the closest known word, or all known words."""
    names = sorted(known)
    close = difflib.get_close_matches(word[:MAX_WORD_CHARS], names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'? (known: {', '.join(names)})"
    return f"known: {', '.join(names)}"
