"""The record of one HTTP request: filled while it is processed, then logged and counted."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret; the names of its models are without aliases, None for all models."""

    name: str
    models: frozenset[str] | None = None

    def allows(self, names: Iterable[str]) -> bool:
        return self.models is None or not self.models.isdisjoint(names)


ANONYMOUS = ApiKey("anonymous")


STATE_NAME = "draftree_record"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
CLIENT_CLOSED = 499
MAX_WARNINGS = 16
MAX_WARNING_CHARS = 256
"""`Warning` headers of one response, and their length: proxies limit the size of all headers."""
UNQUOTED = re.compile(r"[^ !#-\[\]-~]")
"""Characters that a quoted string of a header may not hold as they are."""
_current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request. Times are seconds.

    `endpoint` is the route, empty if there is none; `prompt` and `texts` are set only if they are logged; `notes`
    are sentences about fields without effect, by field.
    """

    request_id: str
    method: str
    path: str
    start: float
    endpoint: str = ""
    status: int = 0
    key: ApiKey = ANONYMOUS
    response_id: str | None = None
    model: str | None = None
    draft: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    accepted_tokens: int | None = None
    rounds: int | None = None
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)
    is_disconnected: bool = False
    error: str | None = None
    prompt: Any = None
    texts: list[str] | None = None
    traceparent: str | None = None
    is_strict: bool = False
    notes: dict[str, str] = field(default_factory=dict)

    def warnings(self) -> list[tuple[bytes, bytes]]:
        """Return the notes as `Warning` headers (RFC 7234, code 299)."""
        texts = [UNQUOTED.sub("?", text[:MAX_WARNING_CHARS]) for text in self.notes.values()]
        if len(texts) > MAX_WARNINGS:
            texts[MAX_WARNINGS - 1 :] = [f"{len(texts) - MAX_WARNINGS + 1} further warnings are in the server's log"]
        return [(b"warning", f'299 draftree "{text}"'.encode("ascii")) for text in texts]

    def note_first_token(self, now: float) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.start


def request_id_of(given: str | None) -> str:
    if given is not None and REQUEST_ID.fullmatch(given):
        return given
    return f"req-{uuid.uuid4().hex}"


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """Return the record of an ASGI scope; one that is not logged if the request log is not installed."""
    state = scope.setdefault("state", {})
    if STATE_NAME not in state:
        state[STATE_NAME] = RequestRecord(request_id_of(None), scope.get("method", ""), scope.get("path", ""), 0.0)
    record: RequestRecord = state[STATE_NAME]
    return record


def keep_record(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    scope.setdefault("state", {})[STATE_NAME] = record
    _current.set(record)


def current_record() -> RequestRecord | None:
    return _current.get()
