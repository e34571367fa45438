"""Incremental check of JSON, character by character."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import final

__all__ = ["JsonScan", "State"]

MAX_DEPTH = 64
SPACE = " \t\n\r"
ESCAPES = '"\\/bfnrt'
CLOSING = {"{": "}", "[": "]"}
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_START = re.compile(r"-?((0|[1-9][0-9]*)((\.[0-9]+)?([eE][+-]?[0-9]*)?|\.))?")
WORDS = {"t": "true", "f": "false", "n": "null"}


class State(Enum):
    """Kinds of the next character."""

    VALUE = auto()
    VALUE_OR_END = auto()
    """The first element of an array, or its end."""
    KEY = auto()
    KEY_OR_END = auto()
    """The first key of an object, or its end."""
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    CODE = auto()
    """Hexadecimal digits of an escape."""
    NUMBER = auto()
    WORD = auto()
    """The rest of true, false or null."""
    DONE = auto()


@final
class JsonScan:
    """State of one JSON value of which some characters are read. Mutated by `push`.

    Attributes:
        state: what the next character may be.
        depth: number of open objects and arrays.
    """

    def __init__(self) -> None:
        self.state = State.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._number = ""
        self._rest: str | int = ""

    @property
    def depth(self) -> int:
        """Number of open objects and arrays."""
        return len(self._open)

    def push(self, character: str) -> bool:
        """Read a character; return whether the text is still the beginning of JSON, which it stays if so."""
        if self.state is State.STRING:
            return self._string(character)
        if self.state in (State.ESCAPE, State.CODE):
            return self._escape(character)
        if self.state is State.WORD:
            return self._word(character)
        if self.state is State.NUMBER:
            if character in "0123456789+-.eE":
                self._number += character
                return is_number_start(self._number)
            if not is_number(self._number):
                return False
            self._end_value()
        if character in SPACE:
            return True
        return self._between(character)

    def _between(self, character: str) -> bool:
        """Read a character that begins a value or a key, or stands between them."""
        state = self.state
        if state in (State.VALUE, State.VALUE_OR_END) and character not in "]}":
            return self._begin(character)
        if state in (State.KEY, State.KEY_OR_END) and character == '"':
            self.state, self._is_key = State.STRING, True
            return True
        if state is State.COLON and character == ":":
            self.state = State.VALUE
            return True
        if state is State.COMMA_OR_END and character == ",":
            self.state = State.KEY if self._open[-1] == "{" else State.VALUE
            return True
        if state in (State.COMMA_OR_END, State.KEY_OR_END, State.VALUE_OR_END) and character in "]}":
            return self._close(character)
        return False

    def _begin(self, character: str) -> bool:
        if character in CLOSING:
            self._open.append(character)
            self.state = State.KEY_OR_END if character == "{" else State.VALUE_OR_END
            return len(self._open) <= MAX_DEPTH
        if character == '"':
            self.state, self._is_key = State.STRING, False
            return True
        if character in WORDS:
            self.state, self._rest = State.WORD, WORDS[character][1:]
            return True
        self.state, self._number = State.NUMBER, character
        return character in "-0123456789"

    def _close(self, character: str) -> bool:
        if CLOSING[self._open[-1]] != character:
            return False
        self._open.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.state = State.COMMA_OR_END if self._open else State.DONE

    def _string(self, character: str) -> bool:
        if character == "\\":
            self.state = State.ESCAPE
        elif character == '"':
            if self._is_key:
                self.state = State.COLON
            else:
                self._end_value()
        return character >= " "

    def _escape(self, character: str) -> bool:
        if self.state is State.ESCAPE:
            self.state, self._rest = (State.CODE, 4) if character == "u" else (State.STRING, 0)
            return character in ESCAPES or character == "u"
        assert isinstance(self._rest, int)
        self._rest -= 1
        if self._rest == 0:
            self.state = State.STRING
        return character in "0123456789abcdefABCDEF"

    def _word(self, character: str) -> bool:
        assert isinstance(self._rest, str)
        if character != self._rest[0]:
            return False
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return True


def is_number(text: str) -> bool:
    """Return whether the text is a JSON number."""
    return NUMBER.fullmatch(text) is not None


def is_number_start(text: str) -> bool:
    """Return whether the text is the beginning of a JSON number."""
    return NUMBER_START.fullmatch(text) is not None
