"""The effects of a request's tools on its prompt, its sampling parameters and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar.schema import schema_text
from draftree.sampling.grammar.schema_rules import SchemaRules
from draftree.sampling.params import SamplingParams
from draftree.serve.errors import invalid
from draftree.serve.notes import note
from draftree.serve.reasoning import AnswerParser, Reasoning
from draftree.serve.tools.families import FAMILIES, GENERIC, Family, family_of
from draftree.serve.tools.functions import Function, functions_of, is_forced, required_name
from draftree.serve.tools.generic import without_tools
from draftree.serve.tools.parser import CallFormat, CallParser
from draftree.serve.tools.xml_grammar import xml_grammar
from draftree.text.chat.messages import check_messages
from draftree.text.chat.template_names import reads_key
from draftree.text.tokenizer import Tokenizer

__all__ = ["ToolPlan"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of one request.

    Attributes:
        functions: what the template gets; empty without tools, or with tool_choice "none".
        family: the format of calls; None without tools.
        grammar: EBNF that forces a call; None if the model decides.
        is_parallel: whether an answer may have several calls.
        hidden: special tokens that the text must show, so that the parser gets the markers of calls.
    """

    functions: tuple[Function, ...] = ()
    family: Family | None = None
    grammar: str | None = None
    is_parallel: bool = True
    hidden: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, tools: object, *, tool_choice: object = None, is_parallel: bool = True
    ) -> Self:
        """Check the tools of a request.

        Args:
            tokenizer: of the model.
            tools: as `functions_of`; None without tools.
            tool_choice: as `required_name`.
            is_parallel: whether an answer may have several calls.

        Raises:
            ApiError: tools of another form, or a model without a template or with an unknown format of calls.
        """
        functions = functions_of(tools)
        name = required_name(tool_choice, functions)
        if not functions or tool_choice == "none":
            return cls()
        family = _family(tokenizer)
        assert tokenizer is not None
        forced = is_forced(tool_choice)
        strict = next((number for number, function in enumerate(functions) if function.is_strict), None)
        if strict is not None and not forced:
            reason = 'strict arguments are supported with tool_choice "required" or a named function only'
            raise invalid(f"{reason}: leave 'strict' out", f"tools[{strict}].function.strict")
        grammar = None
        if forced and not family.opening:
            message = f"a call cannot be forced in the format '{family.name}': use tool_choice \"auto\""
            raise invalid(message, "tool_choice", code="unsupported_parameter")
        if forced:
            grammar = _grammar(family, functions, name, is_parallel=is_parallel and name is None)
        shown = {tokenizer.added_tokens[token] for token in tokenizer.special_ids}
        hidden = frozenset(shown) if grammar is None and shown.intersection(family.opening) else frozenset()
        return cls(functions, family, grammar, is_parallel, hidden)

    @classmethod
    async def load(
        cls, tokenizer: Tokenizer | None, tools: object, *, tool_choice: object = None, is_parallel: bool = True
    ) -> Self:
        """Return `of` these arguments without blocking the event loop: schemas of many tools take a while.

        Raises:
            ApiError: as `of`.
        """
        make = partial(cls.of, tokenizer, tools, tool_choice=tool_choice, is_parallel=is_parallel)
        return await asyncio.to_thread(make) if tools else make()

    @property
    def is_active(self) -> bool:
        """Whether answers may have calls."""
        return self.family is not None

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The definitions for the template; None without tools, and if messages describe them."""
        return None if self.family is GENERIC else [dict(function.tool) for function in self.functions] or None

    def messages(self, messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        """Return messages for a chat template; in one that has no tools they are texts of messages.

        Raises:
            ApiError: 400, a call of another form.
        """
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if self.family is not GENERIC and (not has_calls or reads_key(template, "tool_calls")):
            return messages
        note("tools", "is written into the messages: the chat template of the model has no tools")
        try:
            check_messages(messages)
        except InvalidRequestError as error:
            raise invalid(str(error), "messages") from error
        return without_tools(messages, self.functions)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with those of the tools.

        Raises:
            ApiError: a forced call together with another constraint, or a grammar that cannot be used.
        """
        if self.hidden:
            params = replace(params, skip_special_tokens=False)
        if self.grammar is None:
            return params
        if params.constraint is not None:
            raise invalid(
                "'tool_choice' forces a call, and the format of the text is given, too: keep one", "tool_choice"
            )
        try:
            return replace(params, grammar=self.grammar)
        except InvalidRequestError as error:
            message = f'the tools are too large for a forced call ({error}): use tool_choice "auto"'
            raise invalid(message, "tool_choice") from error

    def parser(self, reasoning: Reasoning | None = None) -> AnswerParser:
        """Return the parser of one answer.

        Args:
            reasoning: of the answer; None for a model that does not reason.
        """
        splitter = None if reasoning is None else reasoning.splitter({one.name for one in self.functions})
        hidden = self.hidden if reasoning is None else self.hidden | reasoning.hidden
        if self.family is None:
            return AnswerParser(splitter, CallParser(CallFormat((), hidden=hidden) if hidden else None, str))
        form = self.family.format(self.functions, is_forced=self.grammar is not None, hidden=hidden)
        calls = CallParser(form, self.family.new_id, max_calls=None if self.is_parallel else 1)
        return AnswerParser(splitter, calls)


def _family(tokenizer: Tokenizer | None) -> Family:
    template = None if tokenizer is None else tokenizer.chat_template
    if tokenizer is None or template is None:
        raise invalid("this model has no chat template: leave 'tools' out", "tools")
    if not tokenizer.template_uses_tools:
        return GENERIC
    found = family_of(template)
    if found is None:
        known = ", ".join(family.name for family in FAMILIES)
        message = f"the format of calls in this model's chat template is not known (known: {known}): leave 'tools' out"
        raise invalid(message, "tools")
    return found


def _grammar(family: Family, functions: tuple[Function, ...], name: str | None, *, is_parallel: bool) -> str:
    chosen = {number: function for number, function in enumerate(functions) if name in (None, function.name)}
    if not family.is_xml:
        rules = SchemaRules()
        calls = {function.name: _add(rules, function.schema, number) for number, function in chosen.items()}
        return family.grammar(calls, rules.text, is_parallel=is_parallel)
    try:
        return xml_grammar(chosen, is_parallel=is_parallel)
    except (RuntimeError, ValueError) as error:
        raise invalid(f'the calls cannot be enforced: {error}; use tool_choice "auto"', "tools") from error


def _add(rules: SchemaRules, schema: Mapping[str, Any], number: int) -> str:
    try:
        return rules.add(schema_text(schema), f"tool_{number}")
    except (RuntimeError, ValueError) as error:
        place = f"tools[{number}].function.parameters"
        raise invalid(f"'{place}' cannot be enforced: {error}", place) from error
