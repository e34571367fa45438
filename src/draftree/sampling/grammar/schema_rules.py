"""JSON schemas as rules of EBNF, for grammars that have JSON among other text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import final

from draftree.core.errors import InvalidRequestError
from draftree.core.extras import import_extra
from draftree.sampling.grammar.schema import prepare_schema

__all__ = ["SchemaRules", "literal"]

SHARED = "basic_"
"""Prefix of the rules that are the same for all schemas."""
_NAMES = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:\\.|[^\]\\])*\]|([A-Za-z_][\w.-]*)')
_LOOSE_CLASS, _STRICT_CLASS = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
"""xgrammar allows control characters in strings of bounded length."""


@final
class SchemaRules:
    """Rules of several JSON schemas in one grammar. Mutated by `add`."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The rules as EBNF, without a root."""
        return "".join(f"{name} ::= {body}\n" for name, body in self._rules.items())

    def add(self, schema: str, name: str) -> str:
        """Add the rules of a schema, and return the name of the rule for the whole JSON text, on one line.

        Args:
            schema: JSON text, from `schema_text`.
            name: prefix of the new rules; letters, digits and underscores.

        Raises:
            SchemaError: a part of the schema cannot be enforced.
            InvalidRequestError: xgrammar is not installed.
            RuntimeError: xgrammar refuses the schema.
        """
        xgrammar = import_extra("grammar", "json_schema, regex and grammar need", error=InvalidRequestError)
        printed = str(xgrammar.Grammar.from_json_schema(prepare_schema(schema), any_whitespace=False))
        lines = (line.partition(" ::= ") for line in printed.splitlines() if line)
        rules = {rule: body.replace(_LOOSE_CLASS, _STRICT_CLASS) for rule, _, body in lines}
        shared = {rule: body for rule, body in rules.items() if rule.startswith(SHARED)}
        is_equal = all(self._rules.get(rule, body) == body for rule, body in shared.items())

        def renamed(rule: str) -> str:
            return rule if rule not in rules or (is_equal and rule in shared) else f"{name}_{rule}"

        self._rules |= {renamed(rule): _renamed(body, renamed) for rule, body in rules.items()}
        return renamed("root")


def literal(text: str) -> str:
    """Return a text as a literal of EBNF."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


def _renamed(body: str, rename: Callable[[str], str]) -> str:
    return _NAMES.sub(lambda found: rename(found[1]) if found[1] else found[0], body)
