"""Shared checks of sampling parameters: numbers in a range, refusals, and unknown names."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import reprlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from draftree.core.errors import InvalidRequestError, suggestion

MAX_IDS = 2**18
"""Token ids of one list: as many as the largest vocabularies have."""
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
"""Stop strings, each of which is matched at every character of the text, and characters of one."""
MAX_STOP_IDS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
"""Words, each of which is encoded twice and matched at every token of the text, and characters of one."""
MAX_PREDICTION = 2**20
"""Characters or token ids."""

Params = TypeVar("Params")
ELSEWHERE = {
    "max_new_tokens": "did you mean 'max_tokens'?",
    "max_completion_tokens": "did you mean 'max_tokens'?",
    "num_return_sequences": "did you mean 'n'?",
    "best_of": "all of the 'n' generated texts are returned",
    "do_sample": "temperature=0 takes the most likely token, a temperature above 0 samples",
    "eos_token_id": "add end tokens by 'stop_token_ids', or ignore the model's by 'ignore_eos'",
    "stop_strings": "did you mean 'stop'?",
    "top_logprobs": "did you mean 'logprobs'?",
    "suppress_tokens": "forbid tokens by logit_bias={id: -inf}",
    "structured_outputs": "give one of 'json_schema', 'regex' and 'grammar'",
    "guided_decoding": "give one of 'json_schema', 'regex' and 'grammar'",
    "response_format": "did you mean 'json_schema'?",
    "guided_json": "did you mean 'json_schema'?",
    "guided_regex": "did you mean 'regex'?",
    "guided_grammar": "did you mean 'grammar'?",
}
"""Names that other libraries use for these parameters, if their spelling is too different for a suggestion."""


def names_are_checked(cls: type[Params]) -> type[Params]:
    """Make a dataclass refuse unknown keyword arguments with a suggestion instead of Python's TypeError."""
    build: Callable[..., None] = cls.__init__
    known = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @functools.wraps(build)
    def init(self: Params, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise InvalidRequestError(f"unknown sampling parameter '{name}': {_hint(name, known)}", param=name)
        build(self, *args, **given)

    cls.__init__ = init  # type: ignore[assignment]
    return cls


def _hint(name: str, known: Sequence[str]) -> str:
    return ELSEWHERE.get(name) or suggestion(name, known)


def refuse(name: str, value: Any, allowed: str) -> InvalidRequestError:
    """Return the error for a value that is not allowed; a long value is shortened."""
    return InvalidRequestError(
        f"{name}={shown(value)} is refused: {name} must be {allowed}", param=name.partition("[")[0]
    )


def shown(value: Any) -> str:
    """Return a value for a message, shortened if it is too deep or too large."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    short.maxlist = short.maxtuple = short.maxdict = 40
    text = short.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Whole:
    """Check for whole numbers in a range, and None if it is optional."""

    low: int
    high: int | None = None
    optional: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values as text."""
        bounds = f"of at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
        return f"a whole number {bounds}" + (" or None" if self.optional else "")

    def __call__(self, name: str, value: Any) -> int | None:
        """Return the number as an int, or raise."""
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise refuse(name, value, self.allowed)
        number = int(value)
        if number < self.low or (self.high is not None and number > self.high):
            raise refuse(name, value, self.allowed)
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """Check for finite numbers in a range; `allowed` describes it."""

    low: float
    high: float
    allowed: str
    above_low: bool = False

    def __call__(self, name: str, value: Any) -> float:
        """Return the number as a float, or raise."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise refuse(name, value, self.allowed)
        # compared before conversion: a whole number may be too large for a float
        if not self.low <= value <= self.high or (self.above_low and value == self.low):  # type: ignore[operator]
            raise refuse(name, value, self.allowed)
        return float(value)


@dataclass(frozen=True, slots=True)
class Strings:
    """Check for a list of strings that are not empty; None is an empty list.

    Attributes:
        most: maximum number of strings.
        chars: maximum length of each.
        may_be_one: whether a string stands for a list of it.
    """

    most: int
    chars: int
    may_be_one: bool = False

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        """Return the strings, or raise."""
        allowed = "a list of strings that are not empty"
        if value is None:
            return ()
        if isinstance(value, str) and self.may_be_one:
            value = (value,)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise refuse(name, value, allowed)
        require_length(name, value, self.most, "strings")
        for item in value:
            if not isinstance(item, str) or not item:
                raise refuse(name, value, allowed)
            require_length(name, item, self.chars, "characters in one string")
        return tuple(value)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Check for a list of token ids; None is an empty list.

    Attributes:
        most: maximum number of ids.
    """

    most: int = MAX_IDS

    def __call__(self, name: str, value: Any) -> tuple[int, ...]:
        """Return the ids, or raise."""
        allowed = "a list of token ids, which are whole numbers of at least 0"
        if value is None:
            return ()
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
            raise refuse(name, value, allowed)
        require_length(name, value, self.most, "token ids")
        if not all(is_token_id(item) for item in value):
            raise refuse(name, value, allowed)
        return tuple(int(item) for item in value)


def is_token_id(value: Any) -> bool:
    """Return whether the value is a whole number of at least 0."""
    if type(value) is int:  # first, because the general test takes most of the time of long lists
        return value >= 0
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def require_length(name: str, value: Sized, most: int, items: str) -> None:
    """Raise for a value that is too long.

    Args:
        name: of the parameter.
        value: its value, or a part of it.
        most: maximum length.
        items: what is counted, in plural.

    Raises:
        InvalidRequestError: the value is longer.
    """
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} {items}: at most {most} are allowed", param=name)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Check for one of a few words."""

    words: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str:
        """Return the word, or raise."""
        if not isinstance(value, str) or value not in self.words:
            raise refuse(name, value, " or ".join(map(repr, self.words)))
        return str(value)


@dataclass(frozen=True, slots=True)
class Count:
    """Check for whole numbers of at least `low`, -1 (which means `everything`), and None."""

    low: int
    everything: str

    def __call__(self, name: str, value: Any) -> int | None:
        """Return the number as an int, or raise."""
        if value is None:
            return None
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_whole or (value < self.low and value != -1):
            allowed = f"a whole number of at least {self.low}, -1 ({self.everything}) or None"
            raise refuse(name, value, allowed)
        return int(value)
