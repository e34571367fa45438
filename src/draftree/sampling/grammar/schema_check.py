"""Check of finished texts against their schema, for what a grammar cannot enforce."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from draftree.sampling.grammar.languages import Language, Languages
from draftree.sampling.grammar.regex import language, parse

__all__ = ["validator_of", "violations"]

MAX_VIOLATIONS = 8
UNCHECKED = "what the schema says beyond its grammar cannot be checked"


def violations(schema: str, text: str, *, has_prefix: bool = False) -> tuple[str, ...]:
    """Return the keywords of a schema that a text breaks, each with its place; none of the text itself.

    Args:
        schema: JSON, from `schema_text`.
        text: the finished text.
        has_prefix: whether other text, such as reasoning, precedes the JSON.
    """
    try:
        value = _last_value(text) if has_prefix else json.loads(text)
    except ValueError:
        return ("the text is not JSON",)
    found: dict[str, None] = {}
    try:
        for error in validator_of(json.loads(schema)).iter_errors(value):
            place = "/".join(["#", *map(str, list(error.absolute_schema_path)[:-1])])
            found[f"'{error.validator}' at {place}"] = None
            if len(found) == MAX_VIOLATIONS:
                break
    except Exception as error:  # of a reference, or of a schema that contains itself in place
        return (f"{UNCHECKED} ({type(error).__name__})",)
    return tuple(found)


def _last_value(text: str) -> Any:
    """Return the JSON value at the end of a text."""
    decoder = json.JSONDecoder()
    end = len(text.rstrip())
    for start, sign in enumerate(text):
        if sign in '{["-0123456789tfn':
            try:
                value, stop = decoder.raw_decode(text, start)
            except ValueError:
                continue
            if stop == end:
                return value
    raise ValueError("no JSON value")


def validator_of(schema: Any) -> Any:
    """Return a validator of jsonschema that loads nothing, and whose patterns take linear time.

    Names of properties that are given by patterns are not checked: their grammar is exact.
    """
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    kind = validator_for(schema, default=_draft_of(schema))
    ignored = ("patternProperties", "additionalProperties", "unevaluatedProperties")
    checks = {"pattern": _pattern, **{word: _beside_patterns(kind, word) for word in ignored}}
    return extend(kind, checks)(schema, registry=Registry())


def _draft_of(schema: Any) -> Any:
    """Return the validator of the draft whose forms a schema without `$schema` has."""
    from jsonschema.validators import Draft4Validator, Draft7Validator, Draft202012Validator

    draft = Draft202012Validator
    pending = [schema]
    for part in pending:
        if isinstance(part, dict):
            if any(isinstance(part.get(word), bool) for word in ("exclusiveMinimum", "exclusiveMaximum")):
                return Draft4Validator
            draft = Draft7Validator if isinstance(part.get("items"), list) else draft
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)
    return draft


def _beside_patterns(kind: Any, word: str) -> Any:
    """Return jsonschema's check of a keyword, for schemas without patterns of names, which it would match by `re`."""
    check = kind.VALIDATORS.get(word)

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if check is not None and "patternProperties" not in schema:
            yield from check(validator, value, instance, schema) or ()

    return checked


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and isinstance(pattern, str):
        languages, texts = _language(pattern)
        if not languages.matches(texts, instance):
            yield ValidationError("the text does not match the pattern")


@lru_cache(16)
def _language(pattern: str) -> tuple[Languages, Language]:
    languages = Languages()
    return languages, language(parse(pattern), languages, is_search=True)
