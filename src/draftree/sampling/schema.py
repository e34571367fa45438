"""JSON schemas as users give them, and what of a schema no grammar keeps to.

xgrammar reads over some words of JSON Schema. A schema with one of them is refused: a text that follows the
grammar might break it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

UNENFORCED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
    }
)
OF_STRINGS = frozenset({"minLength", "maxLength", "pattern"})
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
COMBINING = ("$ref", "anyOf", "oneOf", "allOf")
ANNOTATIONS = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Words under which schemas stand by name."""
VALUES = ("enum", "const", "default", "examples")
"""Words under which values stand that are no schemas."""


def schema_text(value: Any) -> str:
    """A schema as JSON: of a mapping, of JSON text, or of a class that can tell its own, as pydantic's models can.

    Raises:
        ValueError: it is none of them.
    """
    tells = getattr(value, "model_json_schema", None)
    if callable(tells):
        value = tells()
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"a schema is an object, not {type(value).__name__}")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error


def unenforced(schema: Any) -> str | None:
    """What of a schema its grammar would not keep to; None if all is kept."""
    return next(_gaps(schema), None)


def _gaps(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from _gaps(part)
    if not isinstance(schema, dict):
        return
    yield from _own_gaps(schema)
    for word, part in schema.items():
        if word in NAMED and isinstance(part, dict):
            for named in part.values():
                yield from _gaps(named)
        elif word not in VALUES:
            yield from _gaps(part)


def _own_gaps(schema: dict[str, Any]) -> Iterator[str]:
    words = set(schema)
    for word in sorted(words & UNENFORCED):
        if schema[word] is not False:
            yield f"'{word}' is not kept to"
    combining = next((word for word in COMBINING if word in words), None)
    beside = sorted(words - ANNOTATIONS - {combining})
    if combining and beside:
        yield f"'{beside[0]}' beside '{combining}' is not kept to"
    if len(schema.get("allOf") or ()) > 1:
        yield "'allOf' of several schemas is not kept to"
    if "type" not in words and words & (OF_STRINGS | OF_NUMBERS):
        yield f"'{min(words & (OF_STRINGS | OF_NUMBERS))}' without a 'type' is not kept to"
    if "multipleOf" in words and schema.get("type") != "integer":
        yield "'multipleOf' of anything but type integer is not kept to"
    if '"' in str(schema.get("pattern")) or "\\\\" in str(schema.get("pattern")):
        yield "'pattern' with a quotation mark or a backslash in the text is not kept to"
    if "pattern" in words and words & {"minLength", "maxLength"}:
        yield "'minLength' and 'maxLength' beside 'pattern' are not kept to"
    missing = sorted(set(schema.get("required") or ()) - set(schema.get("properties") or ()))
    if missing:
        yield f"'{missing[0]}' is required and not among the properties, which is not kept to"
