"""The state of a running server: loading, accepting, draining, closed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, final

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from draftree.core.errors import RankError
from draftree.core.host import SYSTEM_CLOCK
from draftree.options import RequestOptions
from draftree.serve.access import Authentication, HostCheck, KeyRing, SecurityHeaders
from draftree.serve.errors import encode_json
from draftree.serve.gate import Gate
from draftree.serve.limits import BodyLimit, TimeLimit
from draftree.serve.metrics import Metrics, ModelMeter, RequestMeter
from draftree.serve.pool import ModelPool, ServedModel
from draftree.serve.records import ApiKey, RequestLog, RequestRecord, log_request, record_of
from draftree.serve.rounds import RoundFeed, ServerTraces
from draftree.serve.settings import ServerSettings
from draftree.serve.telemetry import Telemetry

MAX_BYTES = 64 * 2**20  # size of all conversations as JSON text; the least recently used is dropped first

Items = Sequence[Mapping[str, Any]]


@final
class ResponseStore:
    """Items of conversations by the response that ended them; those of more than `max_bytes` are not stored."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.suffix = ""  # the end of the ids of stored responses and their items
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[Items, int]] = OrderedDict()
        self._by_id: dict[tuple[str, str], tuple[str, Mapping[str, Any]]] = {}
        """Items that have an id, each with the last response whose conversation has it."""
        self._size = 0

    def put(self, key: str, response: str, items: Items) -> None:
        size = len(encode_json(items))
        if size > self._max_bytes:
            return
        _, replaced = self._kept.pop((key, response), ((), 0))
        self._kept[key, response] = items, size
        self._by_id |= {(key, item["id"]): (response, item) for item in items if isinstance(item.get("id"), str)}
        self._size += size - replaced
        while self._size > self._max_bytes:
            (owner, name), (gone, dropped) = self._kept.popitem(last=False)
            self._size -= dropped
            for place in ((owner, item["id"]) for item in gone if isinstance(item.get("id"), str)):
                if place in self._by_id and self._by_id[place][0] == name:
                    del self._by_id[place]

    def get(self, key: str, response: str) -> Items | None:
        """Return the items of a conversation; None if it is not stored, or belongs to another key."""
        if (key, response) not in self._kept:
            return None
        self._kept.move_to_end((key, response))
        return self._kept[key, response][0]

    def item(self, key: str, name: str) -> Mapping[str, Any] | None:
        response, item = self._by_id.get((key, name), ("", None))
        if item is not None:
            self._kept.move_to_end((key, response))
        return item


logger = logging.getLogger(__name__)


class DeviceSessions(Protocol):
    """Sessions of devices that draft, as far as the server needs them."""

    @property
    def num_texts(self) -> int: ...

    def status(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


class Server:
    def __init__(self, settings: ServerSettings, pool: ModelPool, *, keys: KeyRing) -> None:
        self.settings, self.pool, self.keys = settings, pool, keys
        self._started = SYSTEM_CLOCK()
        self.gate = Gate(
            max_running=settings.max_concurrent_requests, max_waiting=settings.max_queue, key_share=settings.key_share
        )
        self.responses = ResponseStore()
        self.rounds = RoundFeed(max_readers=settings.max_round_readers)
        self.requests = RequestMeter()
        self.meters: dict[str, ModelMeter] = {}
        self.metrics = Metrics(pool, self.meters, self.requests, gate=self.gate, is_ready=lambda: self.is_ready)
        self.verify: DeviceSessions | None = None
        self._is_closed = False
        self._stop_listening: list[Callable[[], None]] = []
        self._traces = ServerTraces(settings)
        self._telemetry = None if settings.otlp_endpoint is None else Telemetry.sending_to(settings.otlp_endpoint)
        if pool.is_open:
            self._attach(tuple(pool))

    @property
    def is_ready(self) -> bool:
        return self.pool.is_open and not self.gate.is_closed and not self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether an engine has ended although the server has not."""
        return not self._is_closed and not all(model.llm.is_alive for model in self.pool)

    @property
    def lost_process(self) -> RankError | None:
        """Why the server has to end: a process that computes a model with this one has ended."""
        failures = (model.llm.failure for model in self.pool)
        return next((failure for failure in failures if isinstance(failure, RankError)), None)

    @property
    def uptime(self) -> float:
        return SYSTEM_CLOCK() - self._started

    @property
    def has_one_key(self) -> bool:
        """Whether all requests are of one client, so that their priorities compare."""
        return len(self.keys.names) == 1

    @property
    def num_active(self) -> int:
        texts = 0 if self.verify is None else self.verify.num_texts
        return self.gate.num_running + self.gate.num_waiting + texts

    def open(self, models: Sequence[ServedModel]) -> None:
        self.pool.open(models)
        self._attach(models)

    def record_of(self, request: Request) -> RequestRecord:
        return record_of(request.scope)

    def key_of(self, request: Request) -> ApiKey:
        return record_of(request.scope).key

    @asynccontextmanager
    async def admit(self, request: Request, *, texts: int, priority: int) -> AsyncIterator[None]:
        record = self.record_of(request)
        async with self.gate.enter(record.key.name, texts=texts, priority=priority) as ticket:
            record.queue_seconds = ticket.waited
            yield

    @asynccontextmanager
    async def metered(self, request: Request, model: ServedModel, options: RequestOptions) -> AsyncIterator[None]:
        record, meter = self.record_of(request), self.meters[model.name]
        record.response_id = options.request_id
        draft = options.draft if options.draft in ("none", *model.drafts) else model.default_draft
        record.draft = draft
        if options.request_id is not None:
            meter.register(options.request_id, draft)
        try:
            yield
        finally:
            if options.request_id is not None:
                meter.release(options.request_id)

    def begin_drain(self) -> None:
        """Refuse new and waiting requests, and end the readers of rounds; running requests continue."""
        self.gate.close()
        self.rounds.close()

    async def close(self) -> None:
        self.begin_drain()
        self._is_closed = True
        if self.verify is not None:
            await self.verify.close()
        for stop in self._stop_listening:
            stop()
        await self.pool.close()
        self._traces.close()
        if self._telemetry is not None:
            self._telemetry.close()

    def end_request(self, record: RequestRecord) -> None:
        self.requests.observe(record)
        log_request(record)
        if self._telemetry is not None:
            self._telemetry.send(record)

    def _attach(self, models: Sequence[ServedModel]) -> None:
        for model in models:
            meter = self.meters[model.name] = ModelMeter(model.default_draft)
            recorder = self._traces.begin(model)
            for listener in (meter.on_round, self.rounds.listener(model.name), recorder):
                if listener is not None:
                    self._stop_listening.append(model.llm.on_round(listener))


def guarded(app: ASGIApp, server: Server) -> ASGIApp:
    settings = server.settings
    app = TimeLimit(app, timeout=settings.request_timeout)
    app = BodyLimit(app, max_bytes=settings.max_body_bytes, timeout=settings.body_timeout)
    app = Authentication(app, keys=server.keys)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
            expose_headers=["x-request-id", "retry-after", "warning"],
        )
    if settings.is_loopback and settings.uds is None and not server.keys:
        app = HostCheck(app, hosts=settings.allowed_hosts, origins=settings.cors_origins)
    return RequestLog(SecurityHeaders(app), on_end=server.end_request, is_strict=settings.strict_fields)
