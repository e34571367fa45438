"""Definitions of functions that a request offers to the model, and the choice among them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import suggestion
from draftree.sampling.grammar.schema import schema_text
from draftree.serve.errors import invalid

__all__ = ["Function", "functions_of", "is_forced", "required_name"]

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
MAX_TOOLS = 128
KEYS = ("name", "description", "parameters", "strict")
LIKENESS = 0.75
"""Similarity from which another field counts as a misspelt one; the rest is for the chat template."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: its name.
        schema: the JSON schema of its arguments, an object.
        is_strict: whether the arguments must follow the schema.
        tool: its definition as the client sent it, for templates.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool
    tool: Mapping[str, Any]


def functions_of(tools: object, *, place: str = "tools") -> tuple[Function, ...]:
    """Check definitions of tools in the form of /v1/chat/completions.

    Args:
        tools: list of {"type": "function", "function": {"name", "description", "parameters", "strict"}}, or None.
        place: the field of the body.

    Raises:
        ApiError: a definition of another form, or two with one name.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise invalid(f"'{place}' must be a list of at most {MAX_TOOLS} tools", place)
    found = tuple(_function(tool, f"{place}[{number}]") for number, tool in enumerate(tools))
    names = [function.name for function in found]
    for number, name in enumerate(names):
        if name in names[:number]:
            message = f"two tools have the name '{name}': rename one of them"
            raise invalid(message, f"{place}[{number}].function.name")
    return found


def _function(tool: object, place: str) -> Function:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise invalid(f'\'{place}\' must have the form {{"type": "function", "function": {{…}}}}', place)
    inner, place = tool.get("function"), f"{place}.function"
    if not isinstance(inner, Mapping):
        raise invalid(f"'{place}' must be an object with a name", place)
    for key in set(inner).difference(KEYS):
        close = difflib.get_close_matches(key, KEYS, n=1, cutoff=LIKENESS)
        if close:
            raise invalid(f"'{place}.{key}' is unknown: did you mean '{close[0]}'?", f"{place}.{key}")
    name = inner.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        reason = "must have 1 to 64 letters, digits, dots, dashes and underscores"
        raise invalid(f"'{place}.name' {reason}", f"{place}.name")
    if not isinstance(inner.get("description"), str | None):
        raise invalid(f"'{place}.description' must be text", f"{place}.description")
    if not isinstance(inner.get("strict"), bool | None):
        raise invalid(f"'{place}.strict' must be true or false", f"{place}.strict")
    schema = _schema(inner.get("parameters"), f"{place}.parameters")
    return Function(name, schema, bool(inner.get("strict")), tool)


def _schema(given: object, place: str) -> Mapping[str, Any]:
    if given is None or given == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        raise invalid(f"'{place}' must be a JSON schema of the type object", place)
    try:
        found: Mapping[str, Any] = {"type": "object", **json.loads(schema_text(given))}
    except ValueError as error:
        raise invalid(f"'{place}' is not a JSON schema: {error}", place) from error
    return found


def is_forced(choice: object) -> bool:
    """Return whether a choice demands a call."""
    return choice == "required" or isinstance(choice, Mapping)


def required_name(choice: object, functions: tuple[Function, ...], *, place: str = "tool_choice") -> str | None:
    """Return the function that a choice names; None if it names none.

    Args:
        choice: "none", "auto", "required", None, or {"type": "function", "function": {"name": …}}.
        functions: the functions of the request.
        place: the field of the body.

    Raises:
        ApiError: a choice of another form, without tools, or of an unknown function.
    """
    if choice is None or choice == "none" or (choice == "auto" and not functions):
        return None
    if not functions:
        raise invalid(f"'{place}' needs 'tools': leave it out", place)
    if choice in ("auto", "required"):
        return None
    inner = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        form = '{"type": "function", "function": {"name": "…"}}'
        raise invalid(f'\'{place}\' must be "none", "auto", "required" or {form}', place)
    if name not in {function.name for function in functions}:
        message = f"'{place}' names a function that is not in 'tools': {suggestion(name, [f.name for f in functions])}"
        raise invalid(message, place)
    return name
