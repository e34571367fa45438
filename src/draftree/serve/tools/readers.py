"""Readers of one call in a family's format, character by character.

A reader returns the name of the function as soon as it is certain that a call begins, then the arguments as they come.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum, auto
from typing import final

from draftree.serve.tools.json_scan import JsonScan, State

__all__ = ["CallReader", "NamedReader", "ObjectReader", "Status", "json_or_none"]

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_HEADER = 256
"""Longest text between a marker and the arguments, in characters."""


class Status(Enum):
    """Result of a reader."""

    MORE = auto()
    DONE = auto()
    """The call is complete, with this character."""
    BROKEN = auto()
    """The text is no call, from this character on."""


class CallReader(ABC):
    """Reader of one call. Mutated by `push`.

    Attributes:
        name: name of the function; None until it is certain that the text is a call of a known function.
        arguments: characters of the arguments that were read since `take`.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []

    @abstractmethod
    def push(self, character: str) -> Status:
        """Read one character."""

    def take(self) -> str:
        """Return the arguments since the last call of this method."""
        text = "".join(self.arguments)
        self.arguments.clear()
        return text


@final
class ObjectReader(CallReader):
    """Reader of {"name": …, "arguments": {…}}; the keys may have any order, and others are skipped.

    Args:
        names: the known functions.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._scan = JsonScan()
        self._part: list[str] = []
        self._key = ""
        self._found: str | None = None
        self._has_arguments = False
        self._is_open = False

    def push(self, character: str) -> Status:
        """Read one character."""
        before, depth = self._scan.state, self._scan.depth
        if (depth == 0 and before is State.VALUE and character not in "{ \t\r\n") or not self._scan.push(character):
            return Status.BROKEN
        if depth == 0:
            return Status.MORE
        if depth == 1 and not self._read(character, before):
            return Status.BROKEN
        if depth > 1 and self._is_open:
            self.arguments.append(character)
            self._is_open = self._scan.depth > 1
        if self._scan.state is State.DONE:
            return self._end()
        self._decide()
        return Status.MORE

    def _read(self, character: str, before: State) -> bool:
        """Read a character at the level of the call's own keys."""
        after = self._scan.state
        if before in (State.KEY, State.KEY_OR_END, State.VALUE) and after is not before:
            self._part = []
        if before is State.VALUE and after is not before and self._key in ARGUMENT_KEYS:
            if self._has_arguments or character not in '{"n':
                return False
            self._has_arguments = True
            if character == "{":
                self._is_open = True
                self.arguments.append(character)
        self._part.append(character)
        if after is State.COLON and before is State.STRING:
            self._key = json.loads("".join(self._part))
        if after is State.COMMA_OR_END and before is State.STRING:
            return self._text_value(json.loads("".join(self._part)))
        return True

    def _text_value(self, text: str) -> bool:
        if self._key == "name":
            is_new, self._found = self._found is None, text
            return is_new and text in self._names
        if self._key in ARGUMENT_KEYS:
            if not isinstance(json_or_none(text), dict):
                return False
            self.arguments.append(text.strip())
        return True

    def _decide(self) -> None:
        if self._found is not None and self.arguments:
            self.name = self._found

    def _end(self) -> Status:
        if self._found is None:
            return Status.BROKEN
        if self.name is None and not self.arguments:
            self.arguments.append("{}")
        self.name = self._found
        return Status.DONE


@final
class NamedReader(CallReader):
    """Reader of a name with arguments after it: `name[ARGS]{…}` or `name{…}`.

    Args:
        names: the known functions.
    """

    HEADER = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._header = ""
        self._scan = JsonScan()

    def push(self, character: str) -> Status:
        """Read one character."""
        if self.name is None:
            if character != "{":
                self._header += character
                is_short = len(self._header) <= MAX_HEADER and re.fullmatch(r"[\s\w.\[\]-]*", self._header)
                return Status.MORE if is_short else Status.BROKEN
            found = self.HEADER.fullmatch(self._header)
            if found is None or found[1] not in self._names:
                return Status.BROKEN
            self.name = found[1]
        if not self._scan.push(character):
            return Status.BROKEN
        self.arguments.append(character)
        return Status.DONE if self._scan.state is State.DONE else Status.MORE


def json_or_none(text: str) -> object:
    """Return a JSON value; None if the text is not JSON, or has half of a surrogate pair."""
    try:
        text.encode()
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
