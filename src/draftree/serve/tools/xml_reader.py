"""Reader of calls in the XML-like format of Qwen3-Coder.

<function=name>
<parameter=city>
Paris
</parameter>
</function>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, final

from draftree.sampling.grammar.schema import validator_of
from draftree.serve.tools.readers import MAX_HEADER, CallReader, Status, json_or_none

__all__ = ["XmlReader"]

HEAD = re.compile(r"\s*<function=([^<>=\s]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^<>=\n]+)>")
END = re.compile(r"\s*</function>")
PARTIAL = re.compile(r"\s*(<[^>]*)?")
VALUE_END = "</parameter>"


@final
class XmlReader(CallReader):
    """Reader of one function element.

    Args:
        schemas: the JSON schema of the arguments of each known function.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._part = ""
        self._parameter: str | None = None
        self._seen: set[str] = set()

    def push(self, character: str) -> Status:
        """Read one character."""
        self._part += character
        if self.name is None:
            return self._head()
        if self._parameter is None:
            return self._between()
        if character == ">" and self._part.endswith(VALUE_END):
            self._value(self._part.removesuffix(VALUE_END))
        return Status.MORE

    def _head(self) -> Status:
        found = HEAD.fullmatch(self._part)
        if found is not None and found[1] in self._schemas:
            self.name, self._part = found[1], ""
            return Status.MORE
        return self._partial("<function=")

    def _between(self) -> Status:
        """Read between two parameters."""
        found = PARAMETER.fullmatch(self._part)
        if found is not None and found[1] not in self._seen:
            self._parameter, self._part = found[1], ""
            self._seen.add(found[1])
            return Status.MORE
        if END.fullmatch(self._part):
            self.arguments.append("}" if self._seen else "{}")
            return Status.DONE
        return self._partial("<parameter=", "</function>")

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
    found = json_or_none(value)
    if found is None and value.strip() != "null":
        return value
    validator = validator_of(schema)
    # the errors of other parameters, such as missing ones, are the same for both
    read, text = (_errors(validator, {name: one}) for one in (found, value))
    return found if read <= text else value


def _errors(validator: Any, arguments: Mapping[str, Any]) -> int:
    try:
        return sum(1 for _ in validator.iter_errors(arguments))
    except Exception:  # of a reference or a pattern that is not supported: nothing tells the two apart
        return 0
