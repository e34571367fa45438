"""JSON schemas of users: parsed, bounded, and prepared for the grammar compiler.

A schema comes from a request, so its size is bounded before any recursive code processes it. Every allowed schema
compiles eventually: for 49,000 tokens (xgrammar 0.2.8, one busy core of an AMD EPYC) 64 nested arrays take 0.1 s, an
enum of 5,000 strings 0.14 s, 300 properties with additional ones 7 s, and 1,000 of them would take 52 s. A compilation
that exceeds a request's waiting time continues in the background (`compilations.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from draftree.sampling.grammar.schema_gaps import gaps
from draftree.sampling.grammar.schema_oneof import IMPLY_ARRAY
from draftree.sampling.grammar.schema_refs import References, SchemaError

MAX_DEPTH = 64
"""Levels of objects and arrays in a schema; a nested object takes two, one for its 'properties'."""
MAX_VALUES = 8192
"""Objects, arrays, strings, numbers and constants in a schema; keywords are not counted."""
MAX_CHARACTERS = 2**18
"""Length of a schema as JSON text."""
MAX_FREE = 512
"""Properties of a schema in objects that allow additional ones."""
MAX_COUNTED = 2048
"""Properties of an object times its 'minProperties' or 'maxProperties', of all objects of a schema together."""

_LEAP = "(0[48]|[2468][048]|[13579][26])"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|([0-9]{{2}}{_LEAP}|(00|{_LEAP})00)-02-29)"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
EXACT_FORMATS = {"date": _DATE, "date-time": f"{_DATE}T{_TIME}", "time": _TIME, "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}"}
"""Patterns for formats that xgrammar enforces too loosely (it allows 2021-02-30 and 037.0.0.1)."""
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


def prepare_schema(text: str) -> str:
    """Return the schema with every reference in the one form that the grammar compiler resolves.

    Args:
        text: JSON, from `schema_text`.

    Raises:
        SchemaError: a reference has no target, or the grammar would not enforce a part of the schema.
    """
    references = References(json.loads(text))
    schemas = list(references.reachable())
    targets = {id(references.follow(schema)) for schema, _ in schemas if "$ref" in schema}
    names = {id(schema.get("propertyNames")) for schema, _ in schemas} - targets
    for schema, path in schemas:
        gap = next(gaps(schema, references.follow, is_name=id(schema) in names), None)
        if gap is not None:
            raise SchemaError(path, f"{gap}: leave it out, and check the finished text")
    _require_few_properties([schema for schema, _ in schemas])
    resolved = references.resolved(_enforceable)
    try:
        _require_bounded(resolved)
    except ValueError as error:
        raise SchemaError("#", f"with its references resolved, {error}") from error
    return json.dumps(resolved, ensure_ascii=False)


def _require_few_properties(schemas: Iterable[dict[str, Any]]) -> None:
    """Bound the parts whose compile time is more than linear.

    Raises:
        SchemaError: a limit is exceeded.
    """
    free = counted = 0
    for schema in schemas:
        named = schema.get("properties")
        count = len(named) if isinstance(named, dict) else 0
        if any(schema.get(word, False) is not False for word in ("additionalProperties", "unevaluatedProperties")):
            free += count
        bounds = [schema.get(word, 0) for word in ("minProperties", "maxProperties")]
        # a bound above the number of properties costs the same as that number
        most = max(min(bound, count) for bound in [*bounds, 0] if isinstance(bound, int)) if count else 0
        counted += count * most if most > 1 else 0
    if free > MAX_FREE:
        raise SchemaError("#", f"{free} properties are combined with additional ones: at most {MAX_FREE} are allowed")
    if counted > MAX_COUNTED:
        raise SchemaError(
            "#",
            f"'minProperties' and 'maxProperties' times the number of properties make {counted}, and at most "
            f"{MAX_COUNTED} are compiled: use 'required' instead",
        )


def _enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema rewritten in keywords that xgrammar enforces exactly."""
    pattern = EXACT_FORMATS.get(schema.get("format", ""))
    if pattern is not None:
        schema = {word: part for word, part in schema.items() if word != "format"} | {"pattern": pattern}
    if {"minItems", "maxItems"} & set(schema) and not IMPLY_ARRAY & set(schema):
        schema = schema | {"items": True}
    return schema


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
