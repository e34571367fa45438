"""Grammar of forced calls in the XML-like format of Qwen3-Coder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftree.sampling.grammar.schema import schema_text
from draftree.sampling.grammar.schema_rules import SchemaRules, literal
from draftree.serve.tools.functions import Function

__all__ = ["xml_grammar"]

KNOWN = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "$schema",
        "title",
        "description",
    }
)
"""Keywords of an object whose meaning the format enforces."""
PLAIN = frozenset({"type", "title", "description", "default", "examples"})
"""Keywords of a text parameter without a constraint."""
TEXT = 'draftree_text ::= ([^<] | "<" [^/])*\n'
"""Text without the beginning of a closing tag."""


def xml_grammar(functions: Mapping[int, Function], *, is_parallel: bool) -> str:
    """Return EBNF for one call or more; the parameters have the order of the schema.

    Args:
        functions: by number, which makes their rules distinct.
        is_parallel: whether several calls are allowed.

    Raises:
        ValueError: a schema that the format cannot enforce.
        InvalidRequestError: xgrammar is not installed.
    """
    rules = SchemaRules()
    calls = [_function(rules, function, number) for number, function in functions.items()]
    more = ' ("\\n" draftree_call)*' if is_parallel else ""
    opening, closing = literal("<tool_call>\n"), literal("\n</tool_call>")
    return (
        f"root ::= draftree_call{more}\ndraftree_call ::= {opening} ({' | '.join(calls)}) {closing}\n{TEXT}{rules.text}"
    )


def _function(rules: SchemaRules, function: Function, number: int) -> str:
    schema = function.schema
    unknown = sorted(set(schema) - KNOWN)
    if unknown:
        raise ValueError(f"the format of calls cannot enforce {unknown[0]!r}")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    missing = [name for name in required if name not in properties]
    if missing:
        raise ValueError(f"the required parameter {missing[0]!r} is not in 'properties'")
    parts = [literal(f"<function={function.name}>\n")]
    for place, (name, given) in enumerate(properties.items()):
        if any(mark in name for mark in "<>=\n"):
            raise ValueError(f"the format of calls has no place for the name {name!r}")
        value = _value(rules, given, definitions, name=f"tool_{number}_{place}")
        before, after = f"<parameter={name}>\n", "\n</parameter>\n"
        part = f"{literal(before)} {value} {literal(after)}"
        parts.append(part if name in required else f"({part})?")
    return " ".join([*parts, literal("</function>")])


def _value(rules: SchemaRules, schema: Any, definitions: Mapping[str, Any], *, name: str) -> str:
    """Return the rule for the value of a parameter: bare text, or JSON."""
    if not isinstance(schema, Mapping) or not set(schema) - (PLAIN - {"type"}):
        return "draftree_text"
    texts = schema.get("enum")
    if schema.get("type") == "string" or (isinstance(texts, Sequence) and all(isinstance(one, str) for one in texts)):
        rest = set(schema) - PLAIN - {"enum"}
        if rest:
            raise ValueError(f"the format of calls cannot enforce {sorted(rest)[0]!r} of a text parameter")
        return "draftree_text" if texts is None else "(" + " | ".join(map(literal, texts)) + ")"
    return rules.add(schema_text({**schema, **definitions}), name)
