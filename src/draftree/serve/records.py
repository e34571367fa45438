"""The record of one HTTP request, filled while it is processed, and the log: one line per request, as JSON or text.

Prompts and texts are logged only on request, keys never.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftree.core.errors import harmless
from draftree.core.host import SYSTEM_CLOCK, Clock


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
MAX_WARNING_CHARS = 256  # `Warning` headers of one response, and their length: proxies limit the size of all headers
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


def request_id_of(sent: str | None) -> str:
    if sent is not None and REQUEST_ID.fullmatch(sent):
        return sent
    return f"req-{uuid.uuid4().hex}"


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """Return the record of an ASGI scope; one that is not logged if the request log is not installed."""
    state = scope.setdefault("state", {})
    if STATE_NAME not in state:
        state[STATE_NAME] = RequestRecord(request_id_of(None), scope.get("method", ""), scope.get("path", ""), 0.0)
    return state[STATE_NAME]


def keep_record(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    scope.setdefault("state", {})[STATE_NAME] = record
    _current.set(record)


def current_record() -> RequestRecord | None:
    return _current.get()


REQUESTS = logging.getLogger("draftree.serve.requests")
LOGGERS = ("draftree", "uvicorn.error")
HEADER = b"x-request-id"
TRACEPARENT = b"traceparent"
PROBES = frozenset({"/health", "/ready", "/metrics"})
DIGITS = 6


@dataclass(eq=False)
class RequestLog:
    """ASGI middleware, the outermost: gives every request an id and a record, and reports the record at its end."""

    app: ASGIApp
    on_end: Callable[[RequestRecord], None] = field(kw_only=True)
    is_strict: bool = field(default=False, kw_only=True)
    clock: Clock = field(default=SYSTEM_CLOCK, kw_only=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent_id = next((value for name, value in scope["headers"] if name == HEADER), None)
        request_id = request_id_of(None if sent_id is None else sent_id.decode("latin-1"))
        record = RequestRecord(request_id, scope["method"], scope["path"], self.clock(), is_strict=self.is_strict)
        parent = next((value for name, value in scope["headers"] if name == TRACEPARENT), None)
        record.traceparent = None if parent is None else parent.decode("latin-1")
        keep_record(scope, record)
        is_complete = False

        async def receive_noting() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not is_complete:
                record.is_disconnected = True
            return message

        async def send_noting(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [pair for pair in message.get("headers", ()) if pair[0] != HEADER]
                message["headers"] = [*headers, (HEADER, request_id.encode("ascii")), *record.warnings()]
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive_noting, send_noting)
        except Exception:
            if not is_complete:  # otherwise it is logged, and the client has its answer
                raise
        finally:
            self._end(record, scope)

    def _end(self, record: RequestRecord, scope: Scope) -> None:
        record.seconds = self.clock() - record.start
        record.endpoint = getattr(scope.get("route"), "path", "")
        if record.is_disconnected:
            record.status = CLIENT_CLOSED
        self.on_end(record)


def log_request(record: RequestRecord) -> None:
    level = logging.DEBUG if record.path in PROBES and record.status < 400 else logging.INFO
    if REQUESTS.isEnabledFor(level):
        summary = f"{record.method} {record.path} {record.status or 500} {record.seconds:.3f} s"
        REQUESTS.log(level, summary, extra={"fields": fields(record)})


NOT_LOGGED = frozenset({"start", "endpoint", "is_disconnected", "traceparent", "is_strict", "notes"})


def fields(record: RequestRecord) -> dict[str, Any]:
    """Return the record as the values of a log line; fields without a value are left out."""
    values: dict[str, Any] = {
        field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.name not in NOT_LOGGED
    }
    values |= {
        "status": record.status or 500,
        "key": record.key.name,
        "finish_reasons": record.finish_reasons or None,
        "disconnected": record.is_disconnected or None,
        "warnings": list(record.notes.values()) or None,
    }
    return {
        name: round(value, DIGITS) if name.endswith("_seconds") or name == "seconds" else value
        for name, value in values.items()
        if value is not None
    }


class LineFormatter(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        extra: dict[str, Any] = getattr(record, "fields", {})
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        if self._as_json:
            head = {"time": time, "level": record.levelname.lower(), "logger": record.name}
            message = {} if extra else {"message": record.getMessage()}
            return json.dumps(head | message | extra | trace, default=str)
        shown = " ".join(f"{name}={value}" for name, value in extra.items() if name not in IN_SUMMARY)
        line = harmless(" ".join(filter(None, (time, record.levelname.lower(), record.getMessage(), shown))))
        return "\n".join([line.replace("\n", "\\n"), *(harmless(text) for text in trace.values())])


IN_SUMMARY = frozenset({"method", "path", "status", "seconds"})


@contextmanager
def configured_logs(*, as_json: bool, level: str, stream: TextIO | None = None) -> Iterator[None]:
    """Write the logs of the server and of its libraries to a stream while the context lasts."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(as_json=as_json))
    before = [(logger, logger.level, logger.propagate) for logger in map(logging.getLogger, LOGGERS)]
    for logger, _, _ in before:
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its start and stop are logged by the command
    try:
        yield
    finally:
        for logger, old_level, propagates in before:
            logger.removeHandler(handler)
            logger.setLevel(old_level)
            logger.propagate = propagates
