"""Messages, tools and template variables of a conversation: checked, and in the form that templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftree.core.errors import InvalidRequestError, blaming
from draftree.text.chat.images import PlacedImage, image_of

_IDENTIFIER = re.compile(r"[\w.$-]*")
"""Texts that templates compare or use as keys; they are never changed for the literal encoding."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template."""

    messages: list[dict[str, Any]]  # as templates expect them: text contents, and arguments of calls as objects
    tools: list[dict[str, Any]] | None = None  # function definitions in OpenAI's form; None if there are none
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    add_generation_prompt: bool = True  # whether the header of the assistant's answer is appended
    is_open: bool = False  # whether the text ends with the content of the last message, which is to be continued
    images: tuple[PlacedImage, ...] = ()  # what the parts of type "image" stand for, in their order

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for message in self.messages for key in message)

    @property
    def has_calls(self) -> bool:
        return any("tool_calls" in message for message in self.messages)

    def texts(self) -> list[str]:
        """Return the contents, and every other text that the template may copy, except roles and identifiers."""
        contents = [text for message in self.messages for text in _content_texts(message.get("content"))]
        return [*contents, *filter(_is_free, self._others())]

    def in_parts(self) -> Conversation:
        """Return the same conversation with a list of parts as the content of every message."""
        return replace(self, messages=[_in_parts(message) for message in self.messages])

    def identifiers(self) -> list[str]:
        """Return names, keys and values that a template may compare."""
        return [text for text in self._others() if not _is_free(text)]

    def _others(self) -> Iterator[str]:
        rest = [{key: value for key, value in message.items() if key not in MESSAGE_KEYS} for message in self.messages]
        return _texts([rest, self.tools, dict(self.variables)])

    def changed(
        self, change: Callable[[str], str], *, identifiers: bool = False, except_role: str = ""
    ) -> Conversation:
        """Return the conversation with a change applied to each of its `texts`, and to its `identifiers` if wanted.

        Messages of the role `except_role` stay as they are.
        """

        def selected(text: str) -> str:
            return change(text) if identifiers or _is_free(text) else text

        return replace(
            self,
            messages=[
                message if message["role"] == except_role else _changed_message(message, change, selected)
                for message in self.messages
            ],
            tools=_changed(self.tools, selected),
            variables=_changed(dict(self.variables), selected),
        )


def _changed_message(
    message: Mapping[str, Any], change: Callable[[str], str], selected: Callable[[str], str]
) -> dict[str, Any]:
    changed = {key: value if key in MESSAGE_KEYS else _changed(value, selected) for key, value in message.items()}
    content = message.get("content")
    if isinstance(content, str):
        changed["content"] = change(content)
    elif isinstance(content, list):
        changed["content"] = [{**part, "text": change(part["text"])} if "text" in part else part for part in content]
    return changed


def _content_texts(content: object) -> list[str]:
    if isinstance(content, list):
        return [part["text"] for part in content if "text" in part]
    return [content] if isinstance(content, str) else []


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _is_free(text: str) -> bool:
    return not _IDENTIFIER.fullmatch(text)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(part, change) for key, part in value.items()}
    return [_changed(part, change) for part in value] if isinstance(value, list | tuple) else value


Messages = Sequence[Mapping[str, Any]]
MESSAGE_KEYS = ("role", "content")
IMAGES = ("image", "image_url")  # types of content parts that are images
KNOWN_KEYS = frozenset((*MESSAGE_KEYS, "name", "reasoning_content", "thinking", "tool_call_id", "tool_calls"))
"""Common keys of messages; others must be read by the template."""
MAX_DEPTH = 64  # levels of objects and arrays in tools, arguments and template variables


def conversation_of(
    messages: object,
    *,
    tools: object = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    is_open: bool = False,
) -> Conversation:
    """Check messages, tools and template variables, and convert them to the form that templates expect.

    Text parts are joined by line ends, unless there is an image between them. Arguments of calls, which are JSON text
    in OpenAI's form, become objects; text that is no JSON object, such as that of a call that was cut, stays as it is.
    """
    check_messages(messages)
    assert isinstance(messages, Sequence)
    with blaming("tools"):
        checked_tools = _checked_tools(tools)
    with blaming("template_kwargs"):
        checked_variables = _checked_variables(variables or {})
    made = [_template_message(message) for message in messages]
    last = made[-1]
    if is_open and (last["role"] != "assistant" or "content" not in last or "tool_calls" in last):
        raise InvalidRequestError(
            "continue_final_message needs a last message of the role assistant with a text: add it, or leave "
            "continue_final_message out",
            param="continue_final_message",
        )
    images = tuple(
        image
        for place, message in enumerate(messages)
        for number, part in enumerate(_parts_of(message))
        if part["type"] in IMAGES and (image := image_of(part, f"messages[{place}].content[{number}]")) is not None
    )
    return Conversation(made, checked_tools, checked_variables, add_generation_prompt and not is_open, is_open, images)


def has_images(messages: object) -> bool:
    """Return whether a conversation has an image; False for any other value."""
    if not isinstance(messages, list | tuple):
        return False
    parts = [part for message in messages if isinstance(message, Mapping) for part in _parts_of(message)]
    return any(isinstance(part, Mapping) and part.get("type") in IMAGES for part in parts)


def _parts_of(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def check_messages(messages: object) -> None:
    """Raise unless the value is a valid conversation.

    A message has a "role" and a "content": a text, or a list of parts, each {"type": "text", "text": …},
    {"type": "image", "image": …} or {"type": "image_url", "image_url": {"url": …}}. Messages of the
    assistant may have "tool_calls" or "reasoning_content", and then no content; messages of the role "tool" may have a
    "tool_call_id"; any message may have a "name", and other keys that the template reads.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"A chat must be a list of messages, but got {type(messages).__name__}: "
            'pass [{"role": "user", "content": "…"}].'
        )
    if not messages:
        raise InvalidRequestError("A chat must have at least one message, but the list is empty: add a user message.")
    for number, message in enumerate(messages):
        _check_message(message, f"message {number} of the chat")


def _check_message(message: object, place: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{_capital(place)} must be a dictionary, but is of type {type(message).__name__}: "
            'write {"role": "user", "content": "…"}.'
        )
    _require_text(message, "role", place=place)
    if not message["role"].strip():
        raise InvalidRequestError(f'"role" of {place} is empty: write "system", "user" or "assistant".')
    for key in ("name", "reasoning_content", "tool_call_id"):
        if message.get(key) is not None:
            _require_text(message, key, place=place)
    _require_plain({key: message[key] for key in message if key not in KNOWN_KEYS}, place)
    if message.get("tool_calls"):
        _check_calls(message, place)
    if message.get("content") is None and (message.get("tool_calls") or message.get("reasoning_content") is not None):
        return
    if isinstance(message.get("content"), list | tuple):
        _check_parts(message["content"], place)
        return
    _require_text(message, "content", place=place)


def _check_parts(parts: Sequence[object], place: str) -> None:
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind in IMAGES:
            _check_image(part, f"part {number} of {place}")
            continue
        if not isinstance(part, Mapping) or kind != "text" or set(part) != {"type", "text"}:
            shown = repr(kind) if isinstance(kind, str) else type(part).__name__
            raise InvalidRequestError(
                f'Part {number} of "content" of {place} is not a text part or an image (it is '
                f'{shown[:40]}): only parts {{"type": "text", "text": "…"}} and {{"type": "image", "image": …}} are '
                "supported."
            )
        _require_text(part, "text", place=f"part {number} of {place}")


def _check_image(part: Mapping[str, Any], place: str) -> None:
    if image_of(part, place) is None:
        raise InvalidRequestError(
            f'{_capital(place)} names no image: write {{"type": "image", "image": …}} with a PIL image, bytes, a path '
            'or a data URL, or {"type": "image_url", "image_url": {"url": "data:…"}}.'
        )


def _check_calls(message: Mapping[str, Any], place: str) -> None:
    calls = message["tool_calls"]
    if message["role"] != "assistant" or not isinstance(calls, list | tuple):
        raise InvalidRequestError(
            f'"tool_calls" of {place} must be a list, in a message of the role "assistant": leave it out.'
        )
    for number, call in enumerate(calls):
        where = f"call {number} of {place}"
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise InvalidRequestError(
                f'{_capital(where)} must be {{"id": "…", "type": "function", "function": {{"name": "…", '
                '"arguments": "…"}}: write it so.'
            )
        if call.get("type", "function") != "function":
            raise InvalidRequestError(f'"type" of {where} must be "function": only calls of functions are supported.')
        if call.get("id") is not None:
            _require_text(call, "id", place=where)
        _require_text(call["function"], "name", place=where)
        _require_plain(call, where)
        _arguments(call["function"].get("arguments"), where)


def _arguments(value: object, place: str) -> dict[str, Any] | str:
    """Return the arguments of a call: an object, or text that is none."""
    parsed = value
    if isinstance(value, str):
        require_unicode(value, f'"arguments" of {place}')
        try:
            parsed = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            return value
    if isinstance(parsed, Mapping):
        _require_plain(parsed, f'"arguments" of {place}')
        return dict(parsed)
    if isinstance(value, str):
        return value
    raise InvalidRequestError(f'"arguments" of {place} must be the JSON text of an object, such as "{{}}".')


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    made.pop("tool_calls", None)
    content = message.get("content")
    if isinstance(content, list | tuple):
        if any(part["type"] in IMAGES for part in content):
            made["content"] = [part if part["type"] == "text" else {"type": "image"} for part in map(dict, content)]
        else:
            made["content"] = "\n".join(part["text"] for part in content)
    if message.get("reasoning_content") is not None:
        made.setdefault("content", "")
        # the name in gpt-oss's template
        made["thinking"] = message["reasoning_content"]
    if message.get("tool_calls"):
        made["content"] = made.get("content")
        made["tool_calls"] = [_template_call(call) for call in message["tool_calls"]]
    return made


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {**call["function"], "arguments": _arguments(call["function"].get("arguments"), "a call")}
    kept = {key: value for key, value in call.items() if value is not None}
    return {**kept, "type": "function", "function": function}


def _checked_tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError(
            'tools must be a list of dictionaries: pass [{"type": "function", "function": {"name": "…"}}].'
        )
    _require_plain(tools, "tools")
    return [dict(tool) for tool in tools] or None


def _checked_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in variables.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequestError(f"template_kwargs has the name {name!r}: give names of the template's variables.")
        _require_plain(value, f"the template variable {name}")
    return dict(variables)


def _require_plain(value: object, what: str) -> None:
    """Require JSON values: text, numbers, constants, lists and dictionaries with text keys, of bounded depth."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"{what} is nested deeper than {MAX_DEPTH} levels: flatten it.")
        inner: list[Any] = []
        for part in level:
            if isinstance(part, Mapping):
                inner += [*part, *part.values()]
                if not all(isinstance(key, str) for key in part):
                    raise InvalidRequestError(f"{what} has a key that is not text: use text keys.")
            elif isinstance(part, list | tuple):
                inner += part
            elif isinstance(part, str):
                require_unicode(part, what)
            elif part is not None and not isinstance(part, bool | int | float):
                raise InvalidRequestError(f"{what} has a value of type {type(part).__name__}: use JSON values.")
        level = inner


def _require_text(value: Mapping[str, Any], key: str, *, place: str) -> None:
    text = value.get(key)
    if not isinstance(text, str):
        case = "is missing" if key not in value else f"is of type {type(text).__name__}"
        raise InvalidRequestError(f'"{key}" of {place} {case}: it must be text.')
    require_unicode(text, f'"{key}" of {place}')


def require_unicode(text: str, what: str) -> None:
    """Raise for half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{what} is not valid Unicode text (character {error.start} is half of a surrogate pair): "
            "decode the bytes as UTF-8 first."
        ) from error


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
