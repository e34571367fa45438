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
import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

OUT_OF_MEMORY = (
    "there is not enough memory: raise the limit of this process (ulimit -v, the container's), free memory, "
    "or use a smaller model or dtype"
)
SIGNS = re.compile(
    "can(no|')t allocate memory|failed to map segment|(not enough|insufficient|out of) memory|unable to (allocate|mmap)"
    "|failed to allocate|alloc_failed|bad_alloc|posix_memalign|can't start new thread"
    # of oneDNN; a primitive descriptor cannot be created where an operation is not supported
    "|could not create a (primitive|memory)(?! descriptor)",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, comes from a lack of memory."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if SIGNS.search(str(error)):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise `RuntimeError` for a panic, which derives from `BaseException` and would end threads and servers."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error


UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, less tab and line feed
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # direction marks, overrides and isolates; line separators
    "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"  # halves of pairs, annotations, invisible tags
)
"""Characters that control a terminal, reorder the displayed line, or cannot be encoded."""


def harmless(text: str) -> str:
    """Return the text with unsafe characters escaped as Python does: an escape character becomes ``\\x1b``."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


MAX_WORD_CHARS = 64  # characters of a word for which a known one is suggested; the comparison takes quadratic time


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


EXTRAS = {
    "audio": "soundfile",
    "gguf": "gguf",
    "grammar": "xgrammar",
    "images": "PIL",
    "pandas": "pandas",
    "parallel": "accelerate",
    "plots": "matplotlib",
    "ray": "ray",
    "remote": "websockets",
    "serve": "fastapi",
    "suite": "jsonschema",
    "telemetry": "opentelemetry",
    "train": "accelerate",
    "tune": "optuna",
}
"""The importable package of every extra."""


def require_extra(extra: str, purpose: str, *, error: Callable[[str], DraftreeError]) -> None:
    """Raise unless the package of an extra is installed; imports nothing.

    Args:
        extra: a key of `EXTRAS`.
        purpose: the beginning of the message, up to its verb: "plots need".
        error: makes the error from its message, such as its class.

    Raises:
        DraftreeError: `error` of the message; the package is not installed.
    """
    if find_spec(EXTRAS[extra]) is None:
        raise error(_message(extra, purpose, "is not installed"))


def import_extra(extra: str, purpose: str, *, error: Callable[[str], DraftreeError]) -> Any:
    """Import the package of an extra; arguments as for `require_extra`.

    Raises:
        DraftreeError: `error` of the message; the package is not installed, or its import fails.
    """
    require_extra(extra, purpose, error=error)
    try:
        return import_module(EXTRAS[extra])
    except ImportError as reason:
        first_line = (str(reason).splitlines() or [type(reason).__name__])[0]
        raise error(_message(extra, purpose, f"cannot be imported ({first_line})")) from reason


def _message(extra: str, purpose: str, case: str) -> str:
    return f"{purpose} the Python package '{EXTRAS[extra]}', which {case}: run pip install 'draftree[{extra}]'"
