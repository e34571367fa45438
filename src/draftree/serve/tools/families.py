"""Formats of calls by model family, recognized from the chat template."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftree.sampling.grammar.ebnf import Dispatch, Marker, Part, Ref, Rules, characters, literal, terminal
from draftree.sampling.grammar.languages import complement, ranges_of
from draftree.serve.tools.functions import Function
from draftree.serve.tools.parser import SPACE, CallFormat
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

    # grammars: the parts of rules around the arguments of a call

    def call(self, name: str, arguments: Part) -> list[Part]:
        """Return the parts of a call without a marker."""
        if self.is_xml:
            return [literal(f"<function={name}>\n"), arguments, literal("</function>")]
        # names have no characters that JSON escapes
        return [literal(f'{{"name": "{name}", "{self.arguments_key}": '), arguments, literal("}")]

    def forced(self, rules: Rules, call: Ref, *, is_parallel: bool) -> list[Part]:
        """Return the parts of an answer that is calls."""
        if self.closing:
            marked = rules.add([literal(f"{self.opening[0]}\n"), call, literal(f"\n{self.closing}")])
            return [marked, *_more(rules, "\n", marked, is_parallel=is_parallel)]
        if self.allows_list:
            return ['"["', call, *_more(rules, ", ", call, is_parallel=is_parallel), '"]"']
        return [call]

    def free(self, rules: Rules, call: Ref, named: Ref, *, marker: Marker, is_parallel: bool) -> list[list[Part]]:
        """Return the alternatives of an answer that is any text with calls in it.

        Args:
            rules: receives further rules.
            call: the rule of a call without a marker.
            named: the rule of a call that is a name and arguments, for families that know it.
            marker: the marker before a call.
            is_parallel: whether several calls are allowed.
        """
        if self.closing:
            body = rules.add(['"\\n"', call, literal(f"\n{self.closing}")])
            return [[Dispatch(body.name, marker, is_parallel)]]
        body = self._after_marker(rules, call, named, is_parallel=is_parallel)
        if not self.is_bare:
            return [[Dispatch(body.name, marker, is_parallel)]]
        # a text that begins with a brace is a call, and one that begins with the beginning of a marker
        text = rules.add([Dispatch(body.name, marker, is_repeated=False)])
        start: list[list[Part]] = [[], [terminal(marker), body], self._bare(rules, call, is_parallel=is_parallel)]
        first = ""
        if isinstance(marker, str):
            first = marker[0]
            rest = rules.reserve()
            rules.define(rest, [[], [literal(first), Ref(rest)], [_others(marker[:2]), text]])
            start.append([literal(first), Ref(rest)])
        start.append([_others(first + "{" + SPACE), text])
        return [["[ \\t\\r\\n]*", rules.add(*start)]]

    def marked(self, rules: Rules, call: Ref, named: Ref, *, marker: Marker, is_parallel: bool) -> list[list[Part]]:
        """Return the alternatives of an answer that is calls with markers; arguments as for `free`."""
        if self.closing:
            return [self.forced(rules, call, is_parallel=is_parallel)]
        body = self._after_marker(rules, call, named, is_parallel=is_parallel)
        bare = [self._bare(rules, call, is_parallel=is_parallel)] if self.is_bare else []
        return [[terminal(marker), body], *bare]

    def _bare(self, rules: Rules, call: Ref, *, is_parallel: bool) -> list[Part]:
        return [call, *_more(rules, "; ", call, is_parallel=is_parallel)]

    def _after_marker(self, rules: Rules, call: Ref, named: Ref, *, is_parallel: bool) -> Ref:
        """Return the rule of what follows a marker that nothing closes."""
        if self.is_bare:
            return rules.add(self._bare(rules, call, is_parallel=is_parallel))
        listed: list[Part] = ['" "?', *self.forced(rules, call, is_parallel=is_parallel)]
        return rules.add(listed, *([[named]] if self.is_named else []))


def _more(rules: Rules, between: str, call: Ref, *, is_parallel: bool) -> list[Part]:
    return [Ref(rules.add([literal(between), call]).name, 0, None)] if is_parallel else []


def _others(signs: str) -> str:
    return characters(complement(ranges_of((ord(sign), ord(sign)) for sign in signs)))


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
