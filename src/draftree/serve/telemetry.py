"""OpenTelemetry spans of requests: the request, its time in the queue, until the first token, and of the other tokens.

Attributes follow the semantic conventions of OpenTelemetry for generative models (`gen_ai.…`) and for HTTP servers;
those of speculation begin with `draftree.`. Spans hold no prompt and no text. A request with a `traceparent` header
(W3C trace context) becomes a child of the client's span. Spans are sent in batches by a thread of the SDK.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, final

from draftree.core.errors import ConfigurationError, require_extra
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.serve.records import RequestRecord
from draftree.version import __version__

NANOSECONDS = 1_000_000_000
SERVER_ERROR = 500


@final
class Telemetry:
    """Sends a finished request as spans."""

    def __init__(
        self,
        exporter: Any,
        *,
        processor: Callable[[Any], Any] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._clock, self._wall = clock, wall
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "draftree"), "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor((processor or BatchSpanProcessor)(exporter))
        self._tracer = self._provider.get_tracer("draftree.serve", __version__)

    @classmethod
    def sending_to(cls, endpoint: str) -> Telemetry:
        require_extra("telemetry", "OpenTelemetry spans need", error=ConfigurationError)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigurationError(
                "OpenTelemetry spans need the Python package 'opentelemetry-exporter-otlp-proto-http', which is not "
                "installed: run pip install 'draftree[telemetry]'"
            ) from error
        return cls(OTLPSpanExporter(endpoint=endpoint))

    def send(self, record: RequestRecord) -> None:
        """Send the spans of a finished request that named a model; others, such as probes, have none."""
        if record.model is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # records have times of a clock without a date
        offset = self._wall() - int(self._clock() * NANOSECONDS)

        def at(seconds: float) -> int:
            return offset + int(seconds * NANOSECONDS)

        carrier = {} if record.traceparent is None else {"traceparent": record.traceparent}
        span = self._tracer.start_span(
            f"{record.method} {record.endpoint or record.path}",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(record)),
            start_time=at(record.start),
        )
        if (record.status or SERVER_ERROR) >= SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR, record.error or ""))
        inside = set_span_in_context(span)
        for name, start, end in _phases(record):
            child = self._tracer.start_span(name, context=inside, start_time=at(start))
            child.end(at(end))
        span.end(at(record.start + record.seconds))

    def close(self) -> None:
        self._provider.shutdown()


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    start, end = record.start, record.start + record.seconds
    queued = start + (record.queue_seconds or 0.0)
    if record.queue_seconds is not None:
        yield "queue", start, queued
    if record.first_token_seconds is not None:
        first = start + record.first_token_seconds
        yield "first token", queued, first
        yield "decode", first, end


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    values: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status or SERVER_ERROR,
        "error.type": record.error,
        "gen_ai.provider.name": "draftree",
        "gen_ai.operation.name": "chat" if "chat" in record.path else "text_completion",
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "draftree.request_id": record.request_id,
        "draftree.draft": record.draft,
        "draftree.cached_tokens": record.cached_tokens,
        "draftree.accepted_tokens": record.accepted_tokens,
        "draftree.rounds": record.rounds,
        "draftree.disconnected": record.is_disconnected or None,
    }
    yield from ((name, value) for name, value in values.items() if value is not None)
