"""JSON schemas of users: parsed, and bounded before any recursive code reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 64
"""Levels of objects and arrays in a schema; a nested object takes two, one for its 'properties'."""
MAX_VALUES = 8192
"""Objects, arrays, strings, numbers and constants in a schema; keywords are not counted."""
MAX_CHARACTERS = 2**18
"""Length of a schema as JSON text."""
_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', flags=re.DOTALL)


def schema_text(value: Any) -> str:
    """Return a schema as JSON text: from a mapping, JSON text, or a class with `model_json_schema` (pydantic models).

    Raises:
        ValueError: the value is none of them, or the schema is too deep, too large or not valid Unicode.
    """
    tells = getattr(value, "model_json_schema", None)
    if callable(tells):
        try:
            value = tells()
        except Exception as error:  # user code, which may raise anything
            raise ValueError(f"model_json_schema() raised {error!r}") from error
    if isinstance(value, str):
        value = value.removeprefix("\ufeff")
        _require_bounded_text(value)
        value = json.loads(value, object_pairs_hook=_without_duplicates)
    if not isinstance(value, Mapping):
        raise ValueError(f"a schema is an object, not {type(value).__name__}")
    _require_bounded(value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!r} is half of a surrogate pair, which is not a character") from error
    _require_length(text)
    return text


def _require_bounded_text(text: str) -> None:
    """Bound the depth of JSON text before the recursive parser."""
    _require_length(text)
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        _require_depth(depth)


def _require_bounded(value: Any) -> None:
    """Bound depth and number of values, without recursion: the value may be of any depth, or contain itself."""
    level, depth, count = [value], 0, 0
    while level:
        count += len(level)
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values: split it, or give a pattern for a long enum")
        containers = [one for one in level if isinstance(one, Mapping | list | tuple)]
        depth += bool(containers)
        _require_depth(depth)
        level = []
        for one in containers:
            if len(one) <= MAX_VALUES:
                level.extend(one.values() if isinstance(one, Mapping) else one)
            else:
                level.extend([None] * len(one))


def _require_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels: flatten it, or use a recursive $ref")


def _require_length(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are compiled: shorten it")


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice in one object")
        found[name] = value
    return found
