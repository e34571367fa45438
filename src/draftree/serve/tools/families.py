"""Formats of calls by model family, recognized from the chat template."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftree.sampling.grammar.schema_rules import literal
from draftree.serve.tools.functions import Function
from draftree.serve.tools.parser import CallFormat
from draftree.serve.tools.readers import NamedReader, ObjectReader
from draftree.serve.tools.xml_reader import XmlReader

__all__ = ["FAMILIES", "GENERIC", "Family", "family_of"]

SHORT_ID = 9
"""Length of the ids of calls that Mistral's templates accept."""


@dataclass(frozen=True, slots=True)
class Family:
    """A format of calls.

    Attributes:
        name: for messages and documentation.
        marks: all of these texts are in the templates of the family.
        opening: markers before a call.
        closing: marker after a call.
        foreign: a template with one of these texts is of another family.
        arguments_key: key of the arguments in a JSON call.
        allows_list: whether one marker may have a JSON list of calls.
        is_bare: whether calls may stand without a marker.
        is_xml: whether calls are XML-like.
        is_named: whether calls may have the name before the arguments.
        new_id: returns the id of a new call.
    """

    name: str
    marks: tuple[str, ...]
    opening: tuple[str, ...]
    closing: str = ""
    foreign: tuple[str, ...] = ()
    arguments_key: str = "arguments"
    allows_list: bool = False
    is_bare: bool = False
    is_xml: bool = False
    is_named: bool = False
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"

    def matches(self, template: str) -> bool:
        """Return whether a chat template is of this family."""
        has_marks = all(mark in template for mark in self.marks)
        return has_marks and not any(mark in template for mark in self.foreign)

    def format(self, functions: Sequence[Function], *, is_forced: bool, hidden: frozenset[str]) -> CallFormat:
        """Return the format for a parser.

        Args:
            functions: the known functions.
            is_forced: whether a grammar forces a call; it has no marker in families whose marker is a special token.
            hidden: special tokens that are shown in the text, and are left out of the answer.
        """
        names = frozenset(function.name for function in functions)
        schemas: Mapping[str, Mapping[str, Any]] = {function.name: function.schema for function in functions}
        other = partial(XmlReader, schemas) if self.is_xml else partial(NamedReader, names) if self.is_named else None
        return CallFormat(
            opening=self.opening,
            closing=self.closing,
            read_object=None if self.is_xml else partial(ObjectReader, names),
            read_other=other,
            allows_list=self.allows_list,
            is_bare=self.is_bare or (is_forced and self.has_bare_grammar),
            hidden=hidden,
        )

    @property
    def has_bare_grammar(self) -> bool:
        """Whether a forced call has no marker: a JSON list, or a JSON object if a call may stand without a marker."""
        return not self.closing

    def grammar(self, calls: Mapping[str, str], rules: str, *, is_parallel: bool) -> str:
        """Return EBNF for one call or more.

        Args:
            calls: names of the rules for the arguments, by function.
            rules: those rules.
            is_parallel: whether several calls are allowed.
        """
        more = {"bare": "", "list": ' (", " draftree_call)*', "marked": ' ("\\n" draftree_call)*'}[self._shape]
        more = more if is_parallel else ""
        root = f'"[" draftree_call{more} "]"' if self._shape == "list" else f"draftree_call{more}"
        alternatives = " | ".join(self._call(name, rule) for name, rule in calls.items())
        return f"root ::= {root}\ndraftree_call ::= {alternatives}\n{rules}"

    @property
    def _shape(self) -> str:
        return "marked" if self.closing else "list" if self.allows_list else "bare"

    def _call(self, name: str, rule: str) -> str:
        # names have no characters that JSON escapes
        before, after = f'{{"name": "{name}", "{self.arguments_key}": ', "}"
        if self._shape == "marked":
            before, after = f"{self.opening[0]}\n{before}", f"{after}\n{self.closing}"
        return f"{literal(before)} {rule} {literal(after)}"


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT_ID))


FAMILIES = (
    Family("qwen3-coder", ("<tool_call>", "<function="), ("<tool_call>",), "</tool_call>", is_xml=True),
    Family("hermes", ("<tool_call>",), ("<tool_call>",), "</tool_call>", ("<arg_key>",), allows_list=True),
    Family("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), allows_list=True, is_named=True, new_id=_short_id),
    Family(
        "llama",
        ('"parameters": ', "ipython"),
        ("<|python_tag|>",),
        arguments_key="parameters",
        is_bare=True,
    ),
    # its calls are messages, which are split from the text together with the reasoning
    Family("harmony", ("<|channel|>", "functions."), ()),
)
"""The known families; the first whose marks are in a template is used."""
GENERIC = Family("generic", (), ("<tool_call>",), "</tool_call>", allows_list=True)
"""The format of models whose template reads no tools."""


def family_of(template: str) -> Family | None:
    """Return the family of a chat template; None if it is not known."""
    return next((family for family in FAMILIES if family.matches(template)), None)
