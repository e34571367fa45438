"""Detection of JSON schema features that no grammar enforces; such a schema is refused, since a text could violate it.

xgrammar enforces a part of JSON Schema 2020-12 and ignores the rest. The lists here were found by compiling a
schema for every keyword, and for pairs of them, and by matching texts that violate it
(`tests/unit/sampling/test_schemas.py` repeats that). Only keywords that are known to be enforced pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

from draftree.sampling.grammar.patterns import unenforced_in_string
from draftree.sampling.grammar.schema_oneof import Exclusion, implied_type, type_of, types_of, values_of

Follow = Callable[[Any], Any]

STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"})
OBJECTS = frozenset(
    {
        "properties",
        "required",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    }
)
KEYWORDS_OF = {"string": STRINGS, "number": NUMBERS, "array": ARRAYS, "object": OBJECTS}
COMBINING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""xgrammar reads one of these and ignores all keywords next to it."""
ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$schema",
        "components",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that cannot be violated. A keyword that begins with 'x-' counts as one."""
KNOWN = frozenset({"type", *COMBINING, *ANNOTATIONS}).union(*KEYWORDS_OF.values())
UNENFORCED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "additionalItems",
        "contains",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "nullable",
        "then",
        "uniqueItems",
    }
)
"""Keywords of JSON Schema that are refused without a suggestion; unknown words are refused with one."""
FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
MAX_MULTIPLE = 1024
"""xgrammar ignores a larger 'multipleOf'."""
MAX_INTEGER = 2**63 - 1


def gaps(schema: dict[str, Any], follow: Follow, *, is_name: bool = False) -> Iterator[str]:
    """Describe the keywords of a schema that its grammar would not enforce.

    Args:
        schema: one schema; nested schemas are not checked.
        follow: returns the schema at the end of a chain of references.
        is_name: whether it is under 'propertyNames', where every value is a string.
    """
    yield from _unknown(schema)
    yield from _combinations(schema, follow)
    yield from _without_type(schema, is_name=is_name)
    yield from _of_strings(schema)
    yield from _of_numbers(schema)
    yield from _of_objects(schema)


def _is_note(word: str) -> bool:
    return word in ANNOTATIONS or word.startswith("x-")


def _unknown(schema: dict[str, Any]) -> Iterator[str]:
    for word in sorted(schema):
        if word in KNOWN or _is_note(word) or (word == "uniqueItems" and schema[word] is False):
            continue
        close = [] if word in UNENFORCED else difflib.get_close_matches(word, KNOWN, n=1)
        yield f"'{word}' is not enforced" + (f" (did you mean '{close[0]}'?)" if close else "")


def _combinations(schema: dict[str, Any], follow: Follow) -> Iterator[str]:
    combining = next((word for word in COMBINING if word in schema), None)
    if combining is None:
        return
    values = values_of(schema)
    fits = values is not None and set(map(type_of, values)) <= types_of(schema)
    allowed = {combining, "uniqueItems", *(("type",) if fits else ())}
    for word in sorted(schema):
        if word not in allowed and not _is_note(word):
            yield f"'{word}' beside '{combining}' is not enforced"
    if any(map(_is_large, values or ())):
        yield f"an integer beyond {MAX_INTEGER} in '{combining}' is not enforced"
    branches = schema[combining]
    if combining == "allOf" and (not isinstance(branches, list) or len(branches) != 1):
        yield "'allOf' of several schemas is not enforced"
    if combining == "oneOf" and isinstance(branches, list):
        yield from _overlaps(branches, follow)


def _overlaps(branches: list[Any], follow: Follow) -> Iterator[str]:
    pair = Exclusion(follow).overlap(branches)
    if pair is not None:
        yield (
            f"'oneOf' is not enforced where a text may fit several schemas, as those at {pair[0]} and {pair[1]} "
            "(write anyOf, or give them different types or a required property with different constants)"
        )


def _without_type(schema: dict[str, Any], *, is_name: bool) -> Iterator[str]:
    if schema.get("type") == []:
        yield "an empty 'type' is not enforced"
    if "type" in schema:
        return
    implied = "string" if is_name else implied_type(schema)
    for kind, keywords in KEYWORDS_OF.items():
        for word in sorted(keywords & set(schema)):
            if kind != implied:
                yield f"'{word}' without a 'type' is not enforced"


def _of_strings(schema: dict[str, Any]) -> Iterator[str]:
    given = schema.get("format")
    if given is not None and (not isinstance(given, str) or given not in FORMATS or not _may_be(schema, "string")):
        yield f"'format' {str(given)[:40]!r} is not enforced (of strings, these are: {', '.join(sorted(FORMATS))})"
    if "pattern" in schema:
        yield from _of_pattern(schema["pattern"], "'pattern'")
    for word in ("format", "pattern"):
        beside = sorted((STRINGS - {word}) & set(schema))
        if word in schema and beside:
            yield f"'{beside[0]}' beside '{word}' is not enforced"


def _of_pattern(pattern: Any, what: str) -> Iterator[str]:
    reason = unenforced_in_string(pattern) if isinstance(pattern, str) else "it is not a string"
    if reason is not None:
        shown = repr(pattern)
        yield f"{what} {shown if len(shown) <= 60 else shown[:57] + '...'} is not enforced ({reason})"


def _of_numbers(schema: dict[str, Any]) -> Iterator[str]:
    ranged = sorted((NUMBERS - {"multipleOf"}) & set(schema))
    step = schema.get("multipleOf")
    if step is not None:
        whole = isinstance(step, int) and not isinstance(step, bool) and 0 < step <= MAX_MULTIPLE
        if schema.get("type") != "integer" or not whole:
            yield f"'multipleOf' is not enforced except for type integer, from 1 to {MAX_MULTIPLE}"
        if ranged:
            yield f"'multipleOf' beside '{ranged[0]}' is not enforced"
    if _may_be(schema, "integer"):
        yield from (f"'{word}' beyond {MAX_INTEGER} is not enforced" for word in ranged if _is_large(schema[word]))


def _of_objects(schema: dict[str, Any]) -> Iterator[str]:
    named, required = schema.get("properties"), schema.get("required")
    missing = set(required if isinstance(required, list) else ()) - set(named if isinstance(named, dict) else ())
    if missing:
        name = min(map(str, missing))
        yield f"'required' is not enforced for '{name}', which is not among the 'properties'"
    more = [word for word in ("additionalProperties", "unevaluatedProperties") if schema.get(word, False) is not False]
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and patterns:
        yield from _of_named_patterns(patterns, [*more, *_present(schema, "properties", "propertyNames")])
    closing = [word for word in ("additionalProperties", "unevaluatedProperties") if schema.get(word) is False]
    if "propertyNames" in schema:
        yield from (
            f"'propertyNames' beside '{word}' is not enforced" for word in [*_present(schema, "properties"), *closing]
        )
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > 1 and (more or patterns or "propertyNames" in schema or not named):
        yield "'minProperties' above 1 is not enforced where names are free, since a name may occur twice"


def _of_named_patterns(patterns: dict[str, Any], beside: list[str]) -> Iterator[str]:
    if beside:
        yield f"'patternProperties' beside '{beside[0]}' is not enforced"
    if len(patterns) > 1:
        yield "'patternProperties' with several patterns is not enforced, since a name may match two"
    for pattern in patterns:
        yield from _of_pattern(pattern, "'patternProperties'")


def _present(schema: dict[str, Any], *words: str) -> list[str]:
    return [word for word in words if schema.get(word) not in (None, {})]


def _may_be(schema: dict[str, Any], kind: str) -> bool:
    given = schema.get("type", kind)
    return kind in given if isinstance(given, list) else given == kind


def _is_large(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_is_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > MAX_INTEGER
