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
    """A key without its secret.

    Attributes:
        name: its name in logs and metrics.
        models: the names of the models that it may use, without aliases; None for all.
    """

    name: str
    models: frozenset[str] | None = None

    def allows(self, names: Iterable[str]) -> bool:
        """Return whether it may use the model with these names, aliases included."""
        return self.models is None or not self.models.isdisjoint(names)


ANONYMOUS = ApiKey("anonymous")
"""The key of every request if no keys are configured."""


STATE_NAME = "draftree_record"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
"""Request ids of clients that are kept; others are replaced."""
CLIENT_CLOSED = 499
"""Status in logs and metrics of a request whose client left before the response."""
MAX_WARNINGS = 16
MAX_WARNING_CHARS = 256
"""`Warning` headers of one response, and their length: proxies limit the size of all headers."""
UNQUOTED = re.compile(r"[^ !#-\[\]-~]")
"""Characters that a quoted string of a header may not hold as they are."""
_current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request. Times are seconds.

    Attributes:
        request_id: the client's if it is well-formed, else a new one.
        method: of HTTP.
        path: as requested, without the query.
        start: arrival on the server's clock.
        endpoint: the route, for metrics; empty if there is none.
        status: of the response; 0 before it begins.
        key: the API key.
        response_id: the id in the response, and in the rounds of the engine.
        model: name of the model.
        draft: the drafter, "none" for plain decoding.
        prompt_tokens: tokens of the prompts.
        cached_tokens: those of them that were in the prefix cache.
        completion_tokens: tokens of the texts.
        accepted_tokens: those of them that were drafted.
        rounds: rounds of the texts.
        queue_seconds: time at the gate.
        first_token_seconds: arrival to the first token.
        seconds: arrival to the end of the response.
        finish_reasons: of the texts.
        is_disconnected: whether the client left before the end.
        error: the code of the error response.
        prompt: only logged on request.
        texts: only logged on request.
        traceparent: the client's W3C trace context, for spans.
        is_strict: whether a field without effect is an error.
        notes: sentences about fields without effect, by field.
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
        """Note the time of the first token; later calls have no effect."""
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.start


def request_id_of(given: str | None) -> str:
    """Return the client's request id if it is well-formed, else a new one."""
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
    """Attach the record to an ASGI scope."""
    scope.setdefault("state", {})[STATE_NAME] = record
    _current.set(record)


def current_record() -> RequestRecord | None:
    """Return the record of the request that this task serves; None outside of a request."""
    return _current.get()
