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
    def has_calls(self) -> bool:
        """Whether a message has calls of tools."""
        return any("tool_calls" in message for message in self.messages)

    def texts(self) -> list[str]:
        """Return every text that the template may copy, except roles, identifiers and empty texts outside contents."""
        contents = [message["content"] for message in self.messages if isinstance(message.get("content"), str)]
        rest: list[Any] = [_without(message, "role", "content") for message in self.messages]
        return [*contents, *_free_texts([*rest, self.tools, dict(self.variables)])]

    def changed(self, change: Callable[[str], str]) -> Conversation:
        """Return the conversation with a change applied to each of its `texts`."""
        return replace(
            self,
            messages=[_changed_message(message, change) for message in self.messages],
            tools=_changed(self.tools, change),
            variables=_changed(dict(self.variables), change),
        )


def _without(message: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


def _changed_message(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    made = {**message, **_changed(_without(message, "role", "content"), change)}
    if isinstance(message.get("content"), str):
        made["content"] = change(message["content"])
    return made


def _is_free(text: str) -> bool:
    return not _IDENTIFIER.fullmatch(text)


def _free_texts(value: object) -> Iterator[str]:
    if isinstance(value, str) and _is_free(value):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _free_texts(key)
            yield from _free_texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _free_texts(one)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value) if _is_free(value) else value
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(one, change) for key, one in value.items()}
    return [_changed(one, change) for one in value] if isinstance(value, list | tuple) else value
