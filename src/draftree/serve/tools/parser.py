"""Incremental parser of answers with calls: any split of a text gives the same calls and the same text."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Literal, final

from pydantic_core import from_json

from draftree.sampling.grammar.schema import validator_of

Kind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer; of a call, the arguments. Only the first delta of a call has its id and name."""

    kind: Kind
    text: str = ""
    index: int = 0  # the number of a call
    id: str | None = None
    name: str | None = None


def joined(deltas: Iterable[Delta], kind: Kind) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; those that the limit of tokens cut, as far as they go."""
    try:
        arguments: dict[str, Any] = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return arguments


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if last and delta.name is None and (delta.kind, delta.index) == (last.kind, last.index):
            result[-1] = replace(last, text=last.text + delta.text)
        else:
            result.append(delta)
    return result


SPACE = " \t\r\n"
MAX_DEPTH = 64
CLOSING = {"{": "}", "[": "]"}
SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
SCALAR_START = re.compile(
    r"-?((0|[1-9][0-9]*)((\.[0-9]+)?([eE][+-]?[0-9]*)?|\.))?|t(r(ue?)?)?|f(a(l(se?)?)?)?|n(u(ll?)?)?"
)
ESCAPE_START = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')


class State(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # the first element of an array, or its end
    KEY = auto()
    KEY_OR_END = auto()  # the first key of an object, or its end
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    SCALAR = auto()  # inside a number, true, false or null
    DONE = auto()


@final
class JsonScan:
    """State of one JSON value of which some characters are read. Mutated by `push`.

    A reader needs to know, in constant time per character, where the value's parts begin and end, and the first
    character that cannot continue it. `pydantic_core.from_json(allow_partial=True)` reads the whole text again at every
    call, and reports neither.
    """

    def __init__(self) -> None:
        self.state = State.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._token = ""  # the scalar, or the escape in a string, that has begun

    @property
    def depth(self) -> int:
        return len(self._open)

    def push(self, character: str) -> bool:
        """Read a character; return whether the text is still the beginning of JSON, which it stays if so."""
        if self.state is State.STRING:
            return self._string(character)
        if self.state is State.SCALAR:
            if character not in ",]}" + SPACE:
                self._token += character
                return SCALAR_START.fullmatch(self._token) is not None
            if not SCALAR.fullmatch(self._token):
                return False
            self._end_value()
        if character in SPACE:
            return True
        match self.state, character:
            case State.VALUE | State.VALUE_OR_END, "{" | "[":
                self._open.append(character)
                self.state = State.KEY_OR_END if character == "{" else State.VALUE_OR_END
                return len(self._open) <= MAX_DEPTH
            case State.VALUE | State.VALUE_OR_END | State.KEY | State.KEY_OR_END, '"':
                self._is_key = self.state in (State.KEY, State.KEY_OR_END)
                self.state = State.STRING
                self._token = ""
            case State.COLON, ":":
                self.state = State.VALUE
            case State.COMMA_OR_END, ",":
                self.state = State.KEY if self._open[-1] == "{" else State.VALUE
            case State.VALUE_OR_END | State.KEY_OR_END | State.COMMA_OR_END, "]" | "}":
                if CLOSING[self._open.pop()] != character:
                    return False
                self._end_value()
            case State.VALUE | State.VALUE_OR_END, _:
                self.state = State.SCALAR
                self._token = character
                return SCALAR_START.fullmatch(character) is not None
            case _:
                return False
        return True

    def _string(self, character: str) -> bool:
        if self._token:
            self._token += character
            is_begun = ESCAPE_START.fullmatch(self._token) is not None
            if len(self._token) == (6 if self._token[1] == "u" else 2):
                self._token = ""
            return is_begun
        if character == "\\":
            self._token = character
        elif character == '"':
            if self._is_key:
                self.state = State.COLON
            else:
                self._end_value()
        return character >= " "

    def _end_value(self) -> None:
        self.state = State.COMMA_OR_END if self._open else State.DONE


ARGUMENT_KEYS = ("arguments", "parameters")
MAX_HEADER = 256  # longest text between a marker and the arguments, in characters


class Status(Enum):
    MORE = auto()
    DONE = auto()  # the call is complete, with this character
    BROKEN = auto()  # the text is no call, from this character on


class CallReader(ABC):
    """Reader of one call in a family's format, character by character. Mutated by `push`.

    It returns the name of the function as soon as it is certain that a call begins, then the arguments as they come.

    `name`: name of the function; None until it is certain that the text is a call of a known function. `arguments`:
    characters of the arguments that were read since `take`.
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
    """Reader of {"name": …, "arguments": {…}}; the keys may have any order, and others are skipped."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._scan = JsonScan()
        self._part: list[str] = []  # characters of the key or value at the level of the call's own keys
        self._key = ""
        self._function: str | None = None
        self._has_arguments = False
        self._is_open = False

    def push(self, character: str) -> Status:
        before, depth = self._scan.state, self._scan.depth
        if (depth == 0 and before is State.VALUE and character not in "{" + SPACE) or not self._scan.push(character):
            return Status.BROKEN
        if depth == 0:
            return Status.MORE
        if depth == 1 and not self._read(character, before):
            return Status.BROKEN
        if depth > 1 and self._is_open:
            self.arguments.append(character)
            self._is_open = self._scan.depth > 1
        if self._scan.state is State.DONE:
            if self._function is not None and self.name is None and not self.arguments:
                self.arguments.append("{}")
            self.name = self._function
            return Status.BROKEN if self.name is None else Status.DONE
        if self._function is not None and self.arguments:
            self.name = self._function
        return Status.MORE

    def _read(self, character: str, before: State) -> bool:
        """Read a character at the level of the call's own keys; return whether the text is still a call."""
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
        if before is State.STRING and after is State.COLON:
            self._key = json.loads("".join(self._part))
        if before is State.STRING and after is State.COMMA_OR_END:
            text = json.loads("".join(self._part))
            if self._key == "name":
                is_new, self._function = self._function is None, text
                return is_new and text in self._names
            if self._key in ARGUMENT_KEYS:
                self.arguments.append(text.strip())
                return isinstance(json_or_none(text), dict)
        return True


@final
class NamedReader(CallReader):
    """Reader of a name with arguments after it: `name[ARGS]{…}` or `name{…}`."""

    HEADER = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._header = ""
        self._scan = JsonScan()

    def push(self, character: str) -> Status:
        if self.name is None:
            if character != "{":
                self._header += character
                is_short = len(self._header) <= MAX_HEADER and re.fullmatch(r"[\s\w.\[\]-]*", self._header)
                return Status.MORE if is_short else Status.BROKEN
            header = self.HEADER.fullmatch(self._header)
            if header is None or header[1] not in self._names:
                return Status.BROKEN
            self.name = header[1]
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


HEAD = re.compile(r"\s*<function=([^<>=\s]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^<>=\n]+)>")
END = re.compile(r"\s*</function>")
PARTIAL = re.compile(r"\s*(<[^>]*)?")
VALUE_END = "</parameter>"


@final
class XmlReader(CallReader):
    """Reader of one function element in the XML-like format of Qwen3-Coder.

    <function=name>
    <parameter=city>
    Paris
    </parameter>
    </function>
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._part = ""
        self._parameter: str | None = None
        self._seen: set[str] = set()

    def push(self, character: str) -> Status:
        self._part += character
        if self.name is None:
            head = HEAD.fullmatch(self._part)
            if head is None or head[1] not in self._schemas:
                return self._partial("<function=")
            self.name = head[1]
            self._part = ""
        elif self._parameter is not None:
            if self._part.endswith(VALUE_END):
                self._value(self._part.removesuffix(VALUE_END))
        elif (head := PARAMETER.fullmatch(self._part)) is not None and head[1] not in self._seen:
            self._parameter = head[1]
            self._part = ""
            self._seen.add(head[1])
        elif END.fullmatch(self._part):
            self.arguments.append("}" if self._seen else "{}")
            return Status.DONE
        else:
            return self._partial("<parameter=", "</function>")
        return Status.MORE

    def _partial(self, *tags: str) -> Status:
        """Return whether the part is the beginning of one of the tags."""
        tag = self._part.lstrip()
        is_known = any(known.startswith(tag) or tag.startswith(known) for known in tags)
        is_open = PARTIAL.fullmatch(self._part) is not None and len(tag) <= MAX_HEADER
        return Status.MORE if is_known and is_open else Status.BROKEN

    def _value(self, text: str) -> None:
        assert self.name is not None
        assert self._parameter is not None
        value = text.removeprefix("\n").removesuffix("\n")
        name = json.dumps(self._parameter, ensure_ascii=False)
        written = json.dumps(_typed(self._schemas[self.name], self._parameter, value), ensure_ascii=False)
        self.arguments.append(f"{', ' if len(self._seen) > 1 else '{'}{name}: {written}")
        self._parameter, self._part = None, ""


def _typed(schema: Mapping[str, Any], name: str, value: str) -> Any:
    """Return the value of a parameter: as JSON if that follows the schema of the arguments, else as text."""
    parsed = json_or_none(value)
    if parsed is None and value.strip() != "null":
        return value
    validator = validator_of(schema)
    # the errors of other parameters, such as missing ones, are the same for both
    read, text = (_errors(validator, {name: candidate}) for candidate in (parsed, value))
    return parsed if read <= text else value


def _errors(validator: Any, arguments: Mapping[str, Any]) -> int:
    try:
        return sum(1 for _ in validator.iter_errors(arguments))
    except Exception:  # of a reference or a pattern that is not supported: nothing tells the two apart
        return 0


@dataclass(frozen=True, slots=True)
class Family:
    name: str  # for messages and documentation
    marks: tuple[str, ...]  # all of these texts are in the templates of the family
    opening: tuple[str, ...]  # markers before a call
    closing: str = ""  # marker after a call
    foreign: tuple[str, ...] = ()  # a template with one of these texts is of another family
    arguments_key: str = "arguments"  # key of the arguments in a JSON call
    allows_list: bool = False  # whether one marker may have a JSON list of calls
    is_bare: bool = False  # whether calls may stand without a marker
    is_xml: bool = False  # whether calls are XML-like
    is_named: bool = False  # whether calls may have the name before the arguments
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"  # returns the id of a new call

    def matches(self, template: str) -> bool:
        has_marks = all(mark in template for mark in self.marks)
        return has_marks and not any(mark in template for mark in self.foreign)

    @property
    def has_bare_grammar(self) -> bool:
        """Whether a forced call has no marker: a JSON list, or a JSON object if a call may stand without a marker."""
        return bool(self.opening) and not self.closing


class _State(Enum):
    TEXT = auto()
    START = auto()
    CALL = auto()
    BETWEEN = auto()
    FULL = auto()  # no more calls are allowed, and the rest is left out


@final
class CallParser:
    """Parser of one answer. Mutated by `push` and `finish`.

    Functions are given by name, with the schemas of their arguments. Texts that are `hidden`, such as special tokens,
    are left out, and so is white space next to a call; with `is_bare`, calls may have no marker. A text that is no call
    by the time its arguments begin is text; arguments that break later stay as they are, and the rest is text.
    """

    def __init__(
        self,
        family: Family | None,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        is_bare: bool,
        hidden: frozenset[str],
        max_calls: int | None,
    ) -> None:
        self._family = family
        self._schemas = schemas
        self._is_bare = is_bare
        self._hidden = hidden
        self._max_calls = max_calls
        texts = hidden.union(family.opening) if family is not None else hidden
        self._markers = Markers(texts)
        self._with_closing = self._markers if family is None else Markers(texts | {family.closing})
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
        self._num_calls = 0

    def push(self, text: str) -> list[Delta]:
        if self._family is None:
            return [Delta("text", text)] if text else []
        self._buffer += text
        while self._buffer and self._step(self._family):
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        if self._state in (_State.START, _State.CALL) and not self._is_begun:
            self._give_up("")
        if self._state is not _State.FULL:
            self._text(self._buffer)
            if self._space and not self._after_call:
                self._out.append(Delta("text", self._space))
        self._buffer = self._space = ""
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._out = merged(self._out), []
        return deltas

    def _step(self, family: Family) -> bool:
        """Read what is certain of the buffer; return whether to go on."""
        if self._state is _State.FULL:
            self._buffer = ""
            return False
        if self._state is _State.TEXT:
            return self._step_text(family)
        character, self._buffer = self._buffer[0], self._buffer[1:]
        if self._state is _State.START:
            self._start(family, character)
        elif self._state is _State.CALL:
            self._call(family, character)
        else:
            self._between(character)
        return True

    def _step_text(self, family: Family) -> bool:
        if self._is_bare and self._at_start:
            ahead = self._buffer.lstrip(SPACE + ";" if self._after_call else SPACE)
            if ahead[:1] == "{" or (ahead[:1] == "[" and family.allows_list):
                self._text(self._buffer[: len(self._buffer) - len(ahead)].replace(";", ""))
                self._buffer = ahead
                self._open("")
                return True
            if self._after_call and not ahead:
                return False
        markers = self._with_closing if self._awaits_closing else self._markers
        marker = markers.search(self._buffer)
        if marker is None:
            kept = markers.partial_length(self._buffer)
            self._text(self._buffer[: len(self._buffer) - kept])
            self._buffer = self._buffer[len(self._buffer) - kept :]
            return False
        self._text(self._buffer[: marker.start()])
        self._buffer = self._buffer[marker.end() :]
        if marker[0] in family.opening:
            self._open(marker[0])
        elif marker[0] not in self._hidden and not self._awaits_closing:
            self._text(marker[0])
        else:
            self._awaits_closing &= marker[0] != family.closing
        return True

    def _open(self, marker: str) -> None:
        self._state, self._marker, self._raw = _State.START, marker, ""
        self._in_list = self._is_begun = False

    def _start(self, family: Family, character: str) -> None:
        if character in SPACE:
            self._raw += character
            return
        if character == "[" and family.allows_list and not self._in_list:
            self._raw, self._in_list = self._raw + character, True
            return
        self._reader = self._reader_of(family, character)
        if self._reader is None:
            self._give_up(character)
            return
        self._state = _State.CALL
        self._call(family, character)

    def _reader_of(self, family: Family, character: str) -> CallReader | None:
        """Return the reader of a call that begins with a character; None if no call does."""
        if character == "{":
            return None if family.is_xml else ObjectReader(self._schemas)
        if self._in_list:
            return None
        return XmlReader(self._schemas) if family.is_xml else NamedReader(self._schemas) if family.is_named else None

    def _call(self, family: Family, character: str) -> None:
        assert self._reader is not None
        status = self._reader.push(character)
        if status is Status.BROKEN and not self._is_begun:
            self._give_up(character)
            return
        if self._reader.name is not None and not self._is_begun:
            self._is_begun = True
            self._after_call = True
            self._space = ""
            self._out.append(Delta("call", index=self._num_calls, id=family.new_id(), name=self._reader.name))
            self._num_calls += 1
        if self._is_begun and self._reader.arguments:
            self._out.append(Delta("call", self._reader.take(), self._num_calls - 1))
        if status is Status.MORE:
            if not self._is_begun:
                self._raw += character
            return
        self._raw, self._is_begun, self._at_start = "", False, True
        self._awaits_closing = status is Status.DONE
        if not self._awaits_closing:
            self._buffer = character + self._buffer
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            self._state = _State.FULL
        else:
            self._state = _State.BETWEEN if self._in_list and self._awaits_closing else _State.TEXT

    def _between(self, character: str) -> None:
        if character == ",":
            self._state, self._marker, self._raw = _State.START, "", character
        elif character not in SPACE:
            self._state = _State.TEXT
            if character != "]":
                self._buffer = character + self._buffer

    def _give_up(self, character: str) -> None:
        """Treat what looked like the beginning of a call as text."""
        marker = "" if self._marker in self._hidden else self._marker
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
            self._out.append(Delta("text", body))
            self._after_call = self._awaits_closing = self._at_start = False


@final
class Markers:
    """Finds markers in a text that grows."""

    def __init__(self, texts: frozenset[str]) -> None:
        ordered = sorted(texts - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._starts = {text[:size] for text in ordered for size in range(1, len(text))}
        self._longest = max(map(len, self._starts), default=0)

    def search(self, text: str) -> re.Match[str] | None:
        return self._pattern.search(text)

    def partial_length(self, text: str) -> int:
        """Return the length of the end of the text that may be the beginning of a marker."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._starts), 0)
