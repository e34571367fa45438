"""The input of a chat template, and the texts in it that come from a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["Conversation"]

_IDENTIFIER = re.compile(r"[\w.$-]*")
"""Texts that templates compare or use as keys; they are never changed for the literal encoding."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template.

    Attributes:
        messages: as templates expect them: text contents, and arguments of calls as objects.
        tools: function definitions in OpenAI's form; None if there are none.
        variables: further variables of the template.
        add_generation_prompt: whether the header of the assistant's answer is appended.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all messages."""
        return frozenset(key for message in self.messages for key in message)

    @property
    def has_calls(self) -> bool:
        """Whether a message has calls of tools."""
        return any("tool_calls" in message for message in self.messages)

    def texts(self) -> list[str]:
        """Return the contents, and every other text that the template may copy, except roles and identifiers."""
        contents = [message["content"] for message in self.messages if isinstance(message.get("content"), str)]
        return [*contents, *filter(_is_free, self._others())]

    def identifiers(self) -> list[str]:
        """Return names, keys and values that a template may compare."""
        return [text for text in self._others() if not _is_free(text)]

    def _others(self) -> Iterator[str]:
        rest = [_without(message, "role", "content") for message in self.messages]
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


def _without(message: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


def _changed_message(
    message: Mapping[str, Any], change: Callable[[str], str], selected: Callable[[str], str]
) -> dict[str, Any]:
    made = {key: _changed(value, selected) for key, value in _without(message, "role", "content").items()}
    made = {key: made.get(key, value) for key, value in message.items()}
    if isinstance(message.get("content"), str):
        made["content"] = change(message["content"])
    return made


def _is_free(text: str) -> bool:
    return not _IDENTIFIER.fullmatch(text)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(one, change) for key, one in value.items()}
    return [_changed(one, change) for one in value] if isinstance(value, list | tuple) else value
