"""Input items of /v1/responses as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftree.serve.errors import invalid
from draftree.serve.notes import note

__all__ = ["chat_tool_choice", "chat_tools", "items_of", "messages_of"]

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
"""Roles of the API, and the roles that templates know."""
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
IGNORED = ("id", "status")
"""Fields that the server's own output items have, and that mean nothing in a conversation."""


def items_of(
    given: str | Sequence[Mapping[str, Any]], stored: Callable[[str], Mapping[str, Any] | None]
) -> list[Mapping[str, Any]]:
    """Return the input items of a request; references to stored items are replaced by these.

    Args:
        given: the field `input`.
        stored: function from an id to the stored item.

    Raises:
        ApiError: there are none, or an item is not stored or named twice.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise invalid("'input' is empty: give a text, or at least one item", "input")
    items: list[Mapping[str, Any]] = []
    names = set[str]()
    for number, item in enumerate(given):
        if item.get("type") == "item_reference":
            place = f"input[{number}]"
            _require_keys(item, ("type",), place)
            name = _text(item, "id", place)
            found = stored(name)
            if found is None:
                message = f"'{place}.id': the item '{name[:100]}' is not stored, or no longer: send the item itself"
                raise invalid(message, f"{place}.id", code="item_not_found")
            if name in names:  # many references to a long item would make any conversation of a short request
                raise invalid(f"'{place}.id': the item '{name[:100]}' is named twice", f"{place}.id")
            names.add(name)
            item = found
        items.append(item)
    return items


def messages_of(
    instructions: str | None, items: Sequence[Mapping[str, Any]], *, num_previous: int
) -> list[dict[str, Any]]:
    """Return the messages of a conversation, with the instructions as the first one.

    Args:
        instructions: of the request.
        items: of the conversation.
        num_previous: number of first items that precede those of the request.

    Raises:
        ApiError: an item of another form, with its place as `param`.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items, -num_previous):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        message = _message(item, place)
        last = messages[-1] if messages else {}
        if message["role"] == "assistant" and "reasoning_content" in last and not last["content"]:
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "reasoning":
        _require_keys(item, ("type", "summary", "content", "encrypted_content"), place)
        if item.get("content"):
            # a message or call after it belongs to the same answer
            reasoning = _content(item["content"], f"{place}.content")
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
        else:
            note(place, "is ignored: it has no reasoning text")
    elif kind == "function_call":
        last = messages[-1] if messages else {}
        # calls of one answer are one message, together with its text
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": None}
            messages.append(last)
        last.setdefault("tool_calls", []).append(_call(item, place))
    elif kind == "function_call_output":
        _require_keys(item, ("type", "call_id", "output"), place)
        content = _content(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": content})
    else:
        known = "message, reasoning, function_call, function_call_output and item_reference"
        raise invalid(f"'{place}.type' is {str(kind)[:40]!r}: {known} are supported", f"{place}.type")


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _require_keys(item, ("type", "role", "content"), place)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"'{place}.role' must be one of {', '.join(ROLES)}", f"{place}.role")
    return {"role": ROLES[role], "content": _content(item.get("content"), f"{place}.content")}


def _call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _require_keys(item, ("type", "call_id", "name", "arguments"), place)
    function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
    return {"id": _text(item, "call_id", place), "type": "function", "function": function}


def _content(content: object, place: str) -> str:
    """Return the text of a content: a text, or text parts, which are joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"'{place}' must be text or a list of text parts", place)
    return "\n".join(_part(part, f"{place}[{number}]") for number, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS:
        raise invalid(f"'{place}' must be a text part: {', '.join(TEXT_PARTS[:2])} are supported", place)
    known = ("type", "text", "annotations", "logprobs")
    _require_keys(part, known, place)
    return _text(part, "text", place)


def _text(item: Mapping[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"'{place}.{key}' must be text", f"{place}.{key}")
    return value


def _require_keys(item: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key, value in item.items():
        if key not in (*known, *IGNORED) and value is not None:
            raise invalid(f"'{place}.{key}' is not supported: leave it out", f"{place}.{key}")


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools in the form of /v1/chat/completions, which has the fields of a function in an object.

    Raises:
        ApiError: a tool that is no function.
    """
    if tools is None:
        return None
    found = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            message = f"'tools[{number}].type' must be \"function\": the server has no tools of its own"
            raise invalid(message, f"tools[{number}].type")
        found.append({"type": "function", "function": {key: tool[key] for key in tool if key != "type"}})
    return found


def chat_tool_choice(choice: object) -> object:
    """Return a tool choice in the form of /v1/chat/completions."""
    if isinstance(choice, Mapping) and choice.get("type") == "function" and set(choice) == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
