"""The effects of a request's tools on its prompt, its sampling parameters and its answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from draftree.core.errors import InvalidRequestError
from draftree.options import RequestOptions
from draftree.sampling.grammar.schema import violations
from draftree.serve.errors import invalid
from draftree.serve.reasoning import AnswerParser, Reasoning
from draftree.serve.records import current_record
from draftree.serve.schema import note
from draftree.serve.tools.families import (
    FAMILIES,
    GENERIC,
    CallGrammar,
    Function,
    call_grammar,
    family_of,
    functions_of,
    required_name,
    without_tools,
)
from draftree.serve.tools.parser import CallParser, Family, json_or_none
from draftree.text.chat.messages import check_messages
from draftree.text.chat.templates import reads_key
from draftree.text.tokenizer import Tokenizer

NO_CALLS = Family("", (), ())


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of one request.

    `functions` is empty without tools or with tool_choice "none", `grammar` None if the answer is free. `hidden` are
    special tokens that the text must show, so that the parser gets the markers of calls.
    """

    functions: tuple[Function, ...] = ()
    family: Family | None = None
    grammar: CallGrammar | None = None
    is_forced: bool = False
    is_parallel: bool = True
    hidden: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        tools: object,
        *,
        tool_choice: object = None,
        is_parallel: bool = True,
        answer: str | None = None,
    ) -> Self:
        """Check the tools of a request; `answer` is the JSON schema of an answer without calls, None for any text."""
        functions = functions_of(tools)
        name = required_name(tool_choice, functions)
        if not functions or tool_choice == "none":
            return cls()
        family = _family(tokenizer)
        assert tokenizer is not None
        forced = tool_choice == "required" or isinstance(tool_choice, dict)
        grammar = None
        if forced or answer is not None or any(function.is_strict for function in functions):
            chosen = {place: function for place, function in enumerate(functions) if name in (None, function.name)}
            grammar = call_grammar(
                family,
                chosen,
                is_forced=forced,
                is_parallel=is_parallel and name is None,
                answer=answer,
                specials={tokenizer.added_tokens[token]: token for token in tokenizer.special_ids},
            )
        shown = {tokenizer.added_tokens[token] for token in tokenizer.special_ids}
        hidden = frozenset(shown) if not forced and shown.intersection(family.opening) else frozenset()
        return cls(functions, family, grammar, is_forced=forced, is_parallel=is_parallel, hidden=hidden)

    @classmethod
    async def load(cls, tokenizer: Tokenizer | None, tools: object, **options: Any) -> Self:
        """Return `of` these arguments without blocking the event loop: schemas of many tools take a while."""
        make = partial(cls.of, tokenizer, tools, **options)
        plan = await asyncio.to_thread(make) if tools else make()
        if plan.grammar is not None:
            for place, parts in plan.grammar.unenforced.items():
                note(place, f"is not enforced in part: {parts}")
        return plan

    @property
    def is_active(self) -> bool:
        return self.family is not None

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The definitions for the template; None without tools, and if messages describe them."""
        return None if self.family is GENERIC else [dict(function.tool) for function in self.functions] or None

    def messages(self, messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        """Return messages for a chat template; in one that has no tools they are texts of messages."""
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if self.family is not GENERIC and (not has_calls or reads_key(template, "tool_calls")):
            return messages
        note("tools", "is written into the messages: the chat template of the model has no tools")
        try:
            check_messages(messages)
        except InvalidRequestError as error:
            raise invalid(str(error), "messages") from error
        return without_tools(messages, self.functions)

    def sampling(self, options: RequestOptions) -> RequestOptions:
        if self.hidden:
            options = replace(options, skip_special_tokens=False)
        if self.grammar is None:
            return options
        if options.constraint is not None:
            if self.is_forced or options.json_schema is None:
                raise invalid(
                    "the format of the text is given, too, and calls do not follow it: keep one", "tool_choice"
                )
            options = replace(options, json_schema=None)
        try:
            return replace(options, grammar=self.grammar.ebnf, grammar_prefix=self.grammar.prefix)
        except InvalidRequestError as error:
            raise invalid(f"the tools are too large for a grammar: {error}", "tools") from error

    def parser(self, reasoning: Reasoning | None = None) -> AnswerParser:
        splitter = None if reasoning is None else reasoning.splitter({function.name for function in self.functions})
        hidden = self.hidden if reasoning is None else self.hidden | reasoning.hidden
        schemas = {function.name: function.schema for function in self.functions}
        family = self.family or (NO_CALLS if hidden else None)
        is_bare = family is not None and (family.is_bare or (self.is_forced and family.has_bare_grammar))
        max_calls = None if self.is_parallel else 1
        calls = CallParser(family, schemas, is_bare=is_bare, hidden=hidden, max_calls=max_calls)
        is_checked = self.grammar is not None and self.grammar.unenforced
        return AnswerParser(splitter, calls, self._check if is_checked else None)

    def _check(self, name: str, arguments: str) -> None:
        """Note what the arguments of a whole call break of the function's schema."""
        schema = next(function.schema for function in self.functions if function.name == name)
        broken = () if json_or_none(arguments) is None else violations(json.dumps(schema), arguments)
        record = current_record()
        if broken and record is not None:
            record.notes["violations"] = f"a call of '{name}' breaks its schema: {'; '.join(broken)}"


def _family(tokenizer: Tokenizer | None) -> Family:
    template = None if tokenizer is None else tokenizer.chat_template
    if tokenizer is None or template is None:
        raise invalid("this model has no chat template: leave 'tools' out", "tools")
    if not tokenizer.template_uses_tools:
        return GENERIC
    family = family_of(template)
    if family is None:
        known = ", ".join(family.name for family in FAMILIES)
        message = f"the format of calls in this model's chat template is not known (known: {known}): leave 'tools' out"
        raise invalid(message, "tools")
    return family
