"""Messages of request bodies in the form that a model's chat template reads."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from draftree.serve.errors import invalid
from draftree.serve.notes import note
from draftree.serve.schema.chat import ChatBody, Message
from draftree.serve.schema.tokens import TokenizeBody
from draftree.serve.tools.families import family_of
from draftree.text.chat.templates import reads_key
from draftree.text.tokenizer import Tokenizer

__all__ = ["adds_prompt", "template_messages", "template_variables"]

LIKENESS = 0.75
"""Similarity from which an unknown field counts as a misspelt one."""


def template_messages(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Return messages for a chat template; fields that it does not read are noted and left out.

    Args:
        messages: of the body.
        template: source of the chat template.

    Raises:
        ApiError: 400, a message without content, or a misspelt field.
    """
    return [_message(message, template, place=f"messages[{place}]") for place, message in enumerate(messages)]


def adds_prompt(body: ChatBody | TokenizeBody) -> bool:
    """Return whether the header of the assistant's answer follows the messages.

    Raises:
        ApiError: 400, the last message is to be continued, too.
    """
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        message = "'continue_final_message' excludes 'add_generation_prompt': set one of them"
        raise invalid(message, "add_generation_prompt")
    return False


def template_variables(given: Mapping[str, Any] | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return variables for a chat template, without switches that are off and that it does not have."""
    known = frozenset() if tokenizer is None else tokenizer.template_variables
    kept = {}
    for name, value in (given or {}).items():
        is_off = value is None or value is False
        if is_off and name not in known and not difflib.get_close_matches(name, known, n=1, cutoff=LIKENESS):
            note(f"chat_template_kwargs.{name[:64]}", "is ignored: the chat template does not read it")
        else:
            kept[name] = value
    return kept


def _message(message: Message, template: str, *, place: str) -> dict[str, Any]:
    reasoning = message.reasoning_content or message.reasoning
    if message.content is None and not message.tool_calls and not reasoning and message.role != "assistant":
        raise invalid(f"'{place}' needs 'content', or calls of the assistant", f"{place}.content")
    if reasoning and (message.role != "assistant" or message.reasoning not in (None, reasoning)):
        reason = "belongs to the role 'assistant', and has the value of 'reasoning_content' if both are sent"
        raise invalid(f"'{place}.reasoning' {reason}: leave it out", f"{place}.reasoning")
    made = message.model_dump(exclude_none=True, include={"content", "tool_calls"})
    family = family_of(template)
    if message.tool_calls and family is not None and family.is_xml:
        made["tool_calls"] = [_with_object(call) for call in message.tool_calls]
    if message.role == "assistant" and len(made) == 0:
        made["content"] = ""
    if reasoning:
        made["reasoning_content"] = reasoning
    # few templates know the role of OpenAI's newer models
    is_system = message.role == "developer" and not reads_key(template, "developer")
    return {"role": "system" if is_system else message.role, **made, **_other_fields(message, template, place)}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments, which may have been cut, are an object: XML templates write its items."""
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str) or not isinstance(function, dict):
        return call
    try:
        found = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        note("messages.tool_calls", "has arguments that are no object, which the chat template cannot write")
        found = {}
    return {**call, "function": {**function, "arguments": found}}


def _other_fields(message: Message, template: str, place: str) -> dict[str, Any]:
    """Return the fields that only some templates read."""
    given = {"name": message.name, "tool_call_id": message.tool_call_id, **(message.model_extra or {})}
    kept = {}
    for field, value in given.items():
        if value is None:
            continue
        if reads_key(template, field) or (message.role == "tool" and field in Message.model_fields):
            kept[field] = value
            continue
        close = difflib.get_close_matches(field, Message.model_fields, n=1, cutoff=LIKENESS)
        if close and close[0] != field:
            path = f"{place}.{field}"
            raise invalid(f"'{path}' is unknown: did you mean '{close[0]}'?", path, code="unknown_parameter")
        note(f"messages.{field[:64]}", "is ignored: the chat template of the model does not read it")
    return kept
