"""Checks of the fields of frames: plain values of the right type and range, or an error that names the field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from draftree.remote.errors import FrameError

__all__ = [
    "MAX_TOKENS",
    "Check",
    "read_flag",
    "read_number",
    "read_numbers",
    "read_params",
    "read_seed",
    "read_token",
    "read_values",
]

Check = Callable[[str, Any], Any]
"""Returns the checked value of a field with this name."""
MAX_TOKENS = 1 << 18
"""Most entries of any list in a frame."""
MAX_ID = 2**53
MAX_NAME = 256


def read_number(name: str, value: Any) -> int:
    """Return a whole number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ID:
        raise FrameError(f"'{name}' is {value!r:.60}: it must be a whole number from 0 to {MAX_ID}")
    return value


def read_seed(name: str, value: Any) -> int:
    """Return a whole number of at most 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
        raise FrameError(f"'{name}' is {value!r:.60}: it must be a whole number of at most 64 bits")
    return value


def read_flag(name: str, value: Any) -> bool:
    """Return a truth value."""
    if not isinstance(value, bool):
        raise FrameError(f"'{name}' is {value!r:.60}: it must be true or false")
    return value


def read_token(name: str, value: Any) -> str | None:
    """Return a short text, or None."""
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise FrameError(f"'{name}' must be a text of at most {MAX_NAME} characters, or nothing")
    return value


def read_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Return whole numbers from 0 on."""
    if not isinstance(value, list):
        raise FrameError(f"'{name}' must be a list of whole numbers")
    if any(isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_ID for item in value):
        raise FrameError(f"'{name}' must be a list of whole numbers of at least 0")
    return tuple(value)


def read_values(name: str, value: Any, length: int) -> Sequence[Any]:
    """Return a list of this many values."""
    if not isinstance(value, list) or len(value) != length:
        raise FrameError(f"'{name}' must be a list of {length} values")
    return value


def read_params(name: str, value: Any) -> dict[str, Any]:
    """Return a map of sampling parameters, unchecked."""
    if not isinstance(value, dict):
        raise FrameError(f"'{name}' must be a map of sampling parameters")
    return value
