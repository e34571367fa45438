"""Incremental parser of answers with calls: any split of a text gives the same calls and the same text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import final

from draftree.serve.tools.deltas import CallDelta, Delta, TextDelta, merged
from draftree.serve.tools.readers import CallReader, Status

__all__ = ["CallFormat", "CallParser", "Markers"]

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are marked in a text.

    Attributes:
        opening: markers before a call.
        closing: marker after a call; empty if there is none.
        read_object: makes the reader of a call that begins with a brace; None if calls begin otherwise.
        read_other: makes the reader of a call that begins with another character; None if calls begin with a brace.
        allows_list: whether one marker may have a JSON list of calls.
        is_bare: whether a call may stand without a marker, at the beginning of the text or after another call.
        hidden: texts that are left out: special tokens.
    """

    opening: tuple[str, ...]
    closing: str = ""
    read_object: Callable[[], CallReader] | None = None
    read_other: Callable[[], CallReader] | None = None
    allows_list: bool = False
    is_bare: bool = False
    hidden: frozenset[str] = field(default_factory=frozenset)


class _State(Enum):
    TEXT = auto()
    START = auto()
    """After a marker, before the first character of the call."""
    CALL = auto()
    BETWEEN = auto()
    """After a call of a list."""
    FULL = auto()
    """No more calls are allowed, and the rest is left out."""


@final
class CallParser:
    """Parser of one answer. Mutated by `push` and `finish`.

    White space next to a call is left out. A text that is no call by the time its arguments begin is text; arguments
    that break later stay as they are, and the rest is text.

    Args:
        form: the format of calls; None if there are none.
        new_id: returns the id of a new call.
        max_calls: further calls, and the text after them, are left out; None for no limit.
    """

    def __init__(self, form: CallFormat | None, new_id: Callable[[], str], *, max_calls: int | None = None) -> None:
        self._form = form
        texts = frozenset(form.opening) | form.hidden if form is not None else frozenset()
        self._markers = Markers(texts)
        self._with_closing = self._markers if form is None else Markers(texts | {form.closing})
        self._new_id = new_id
        self._max_calls = max_calls
        self._state = _State.TEXT
        self._buffer = ""
        self._space = ""
        self._raw = ""
        self._marker = ""
        self._reader: CallReader | None = None
        self._in_list = False
        self._is_begun = False
        self._after_call = False
        self._awaits_closing = False
        self._at_start = True
        self._out: list[Delta] = []
        self.num_calls = 0

    @property
    def is_full(self) -> bool:
        """Whether the rest of the text is left out."""
        return self._state is _State.FULL

    def push(self, text: str) -> list[Delta]:
        """Read a piece of the answer, and return what is certain."""
        if self._form is None:
            return [TextDelta(text)] if text else []
        self._buffer += text
        while self._buffer and self._step(self._form):
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the answer."""
        if self._state in (_State.START, _State.CALL) and not self._is_begun:
            self._give_up("")
        if self._state is not _State.FULL:
            self._text(self._buffer)
            if self._space and not self._after_call:
                self._out.append(TextDelta(self._space))
        self._buffer = self._space = ""
        return self._taken()

    def _taken(self) -> list[Delta]:
        found, self._out = merged(self._out), []
        return found

    def _step(self, form: CallFormat) -> bool:
        """Read what is certain of the buffer; return whether to go on."""
        if self._state is _State.FULL:
            self._buffer = ""
            return False
        if self._state is _State.TEXT:
            return self._step_text(form)
        character, self._buffer = self._buffer[0], self._buffer[1:]
        if self._state is _State.START:
            self._start(form, character)
        elif self._state is _State.CALL:
            self._call(character)
        else:
            self._between(character)
        return True

    def _step_text(self, form: CallFormat) -> bool:
        if form.is_bare and self._at_start:
            ahead = self._buffer.lstrip(SPACE + ";" if self._after_call else SPACE)
            if ahead[:1] == "{" or (ahead[:1] == "[" and form.allows_list):
                self._text(self._buffer[: len(self._buffer) - len(ahead)].replace(";", ""))
                self._buffer = ahead
                self._open("")
                return True
            if self._after_call and not ahead:
                return False
        markers = self._with_closing if self._awaits_closing else self._markers
        found = markers.search(self._buffer)
        if found is None:
            kept = markers.partial_length(self._buffer)
            self._text(self._buffer[: len(self._buffer) - kept])
            self._buffer = self._buffer[len(self._buffer) - kept :]
            return False
        self._text(self._buffer[: found.start()])
        self._buffer = self._buffer[found.end() :]
        if found[0] in form.opening:
            self._open(found[0])
        elif found[0] not in form.hidden and not self._awaits_closing:
            self._text(found[0])
        else:
            self._awaits_closing &= found[0] != form.closing
        return True

    def _open(self, marker: str) -> None:
        self._state, self._marker, self._raw = _State.START, marker, ""
        self._in_list = self._is_begun = False

    def _start(self, form: CallFormat, character: str) -> None:
        if character in SPACE:
            self._raw += character
            return
        if character == "[" and form.allows_list and not self._in_list:
            self._raw, self._in_list = self._raw + character, True
            return
        make = form.read_object if character == "{" else None if self._in_list else form.read_other
        if make is None:
            self._give_up(character)
            return
        self._reader, self._state = make(), _State.CALL
        self._call(character)

    def _call(self, character: str) -> None:
        assert self._reader is not None
        status = self._reader.push(character)
        if status is Status.BROKEN and not self._is_begun:
            self._give_up(character)
            return
        if self._reader.name is not None and not self._is_begun:
            self._begin(self._reader.name)
        if self._is_begun and self._reader.arguments:
            self._out.append(CallDelta(self.num_calls - 1, self._reader.take()))
        if status is Status.MORE:
            if not self._is_begun:
                self._raw += character
            return
        if status is Status.BROKEN:
            self._buffer = character + self._buffer
        self._end(is_whole=status is Status.DONE)

    def _begin(self, name: str) -> None:
        self._is_begun, self._after_call, self._space = True, True, ""
        self._out.append(CallDelta(self.num_calls, id=self._new_id(), name=name))
        self.num_calls += 1

    def _end(self, *, is_whole: bool) -> None:
        self._raw, self._is_begun, self._at_start = "", False, True
        self._awaits_closing = is_whole
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            self._state = _State.FULL
        else:
            self._state = _State.BETWEEN if self._in_list and is_whole else _State.TEXT

    def _between(self, character: str) -> None:
        if character == ",":
            self._state, self._marker, self._raw = _State.START, "", character
        elif character not in SPACE:
            self._state = _State.TEXT
            if character != "]":
                self._buffer = character + self._buffer

    def _give_up(self, character: str) -> None:
        """Treat what looked like the beginning of a call as text."""
        assert self._form is not None
        marker = "" if self._marker in self._form.hidden else self._marker
        self._text(marker + self._raw)
        self._state, self._raw, self._marker = _State.TEXT, "", ""
        self._at_start = False
        self._buffer = character + self._buffer

    def _text(self, text: str) -> None:
        whole = self._space + text
        if self._after_call:
            whole = whole.lstrip(SPACE)
        body = whole.rstrip(SPACE)
        self._space = whole[len(body) :]
        if body:
            self._out.append(TextDelta(body))
            self._after_call = self._awaits_closing = self._at_start = False


@final
class Markers:
    """Finds markers in a text that grows.

    Args:
        texts: the markers.
    """

    def __init__(self, texts: frozenset[str]) -> None:
        ordered = sorted(texts - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._starts = {text[:size] for text in ordered for size in range(1, len(text))}
        self._longest = max(map(len, self._starts), default=0)

    def search(self, text: str) -> re.Match[str] | None:
        """Return the first marker."""
        return self._pattern.search(text)

    def partial_length(self, text: str) -> int:
        """Return the length of the end of the text that may be the beginning of a marker."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._starts), 0)
