"""ASGI app in front of the replicas: forwards requests, and repeats those of lost replicas. Needs no ray."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from fastapi.routing import APIRoute

from draftree.core.errors import DraftreeError
from draftree.core.files import JsonError, parse_json, parse_json_object
from draftree.serve.app import ROUTERS
from draftree.serve.errors import ApiError, Shape, api_error, openai_shape, unavailable
from draftree.serve.ray.routing import (
    AnswerStart,
    Headers,
    HttpRequest,
    Part,
    Receive,
    Scope,
    Send,
    holder_of,
    picklable_scope,
    prefix_blocks,
)
from draftree.serve.records import request_id_of
from draftree.serve.streams import ClientGoneError, EventStream, LineStream, unless_gone

TEXTS = frozenset(
    [
        "arguments",
        "content",
        "delta",
        "partial_json",
        "reasoning",
        "reasoning_content",
        "refusal",
        "response",
        "text",
        "thinking",
    ]
)
"""Keys whose strings are appended to earlier ones."""
ONCE = frozenset({"role", "type", "name", "finish_reason", "stop_reason"})
"""Keys whose values are sent once: clients append the parts of a delta."""
SUMMARIES = frozenset({"usage", "metrics", "explain", "stats"})
"""Keys whose values are of the whole answer: they come with other news, or in the last chunk, which has no choices."""
IDS = frozenset({"id", "item_id", "response_id", "call_id"})
TIMES = frozenset({"created", "created_at"})
DONE = "[DONE]"

Place = tuple[str | int, ...]


class DivergedError(DraftreeError):
    """The repeated stream differs from what the client has."""


@final
class StreamRecord:
    """The part of a stream that a client has received. Every replica that writes the stream begins with `restart`.

    The same request with the same seed gives the same text on every replica, but cut into other pieces, with other ids.
    This record therefore tracks texts, not events: how much of every text was sent (the content of a choice, the
    arguments of a tool call, the pieces by origin). It removes that from the repeated stream and replaces new ids by
    the first ones. A repeated text that differs is never sent: the stream ends with an error.
    """

    def __init__(self, *, is_lines: bool = False) -> None:
        self._is_lines = is_lines
        self._texts: dict[Place, str] = {}
        self._counts: dict[Place, int] = {}
        self._ids: list[str] = []
        self._times: dict[str, Any] = {}
        self._sent: set[Place] = set()
        self._num_sent = 0
        self._is_repeated = False
        self._read_texts: dict[Place, int] = {}
        self._read_counts: dict[Place, int] = {}
        self._own_ids: dict[str, str] = {}

    def restart(self) -> None:
        self._is_repeated = True
        self._read_texts, self._read_counts, self._own_ids = {}, {}, {}

    def push(self, event: str) -> str | None:
        """Return what the client gets of an event, without what separates it from the next; None if nothing is new."""
        name, data = ("", _object_of(event)) if self._is_lines else _parse(event)
        if data is None:
            return event if not self._is_repeated or DONE in event else None
        reduced, is_new = self._typed(data) if isinstance(data.get("type"), str) else self._chunk(data)
        if not self._is_repeated:
            self._num_sent += 1
            return event
        if not is_new:
            return None
        if "sequence_number" in reduced:
            reduced["sequence_number"] = self._num_sent
        self._num_sent += 1
        # ASCII: some clients take other line separators of Unicode for the end of a line
        text = json.dumps(reduced, separators=(",", ":"))
        return text if self._is_lines else f"event: {name}\ndata: {text}" if name else f"data: {text}"

    def _chunk(self, data: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Reduce a chunk; the last one, without choices or with a mark of the end, is sent once."""
        reduced, is_new = self._reduce(data, ())
        is_last = data.get("choices") == [] or data.get("stop") is True or data.get("done") is True
        return reduced, self._once(("last",)) if is_last else is_new

    def _typed(self, data: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Reduce a typed event: deltas are texts, every other event of a place is sent once."""
        keys = ("type", "index", "output_index", "content_index", "summary_index")
        place: Place = tuple(data.get(key, "") for key in keys)
        delta = data.get("delta")
        if isinstance(delta, str):
            kept, is_new = self._reduce({key: data[key] for key in ("delta", "logprobs") if key in data}, place)
            return self._renamed(data) | kept, is_new
        if isinstance(delta, dict) and not TEXTS.isdisjoint(delta):
            kept, is_new = self._reduce({key: delta[key] for key in TEXTS.intersection(delta)}, place)
            return data | {"delta": delta | kept}, is_new
        return self._renamed(data), self._once(place)

    def _renamed(self, value: Any) -> Any:
        """Copy a value with the ids and times of the first stream."""
        if isinstance(value, dict):
            return {key: self._constant(key, item) for key, item in value.items()}
        return [self._renamed(item) for item in value] if isinstance(value, list) else value

    def _constant(self, key: str, value: Any) -> Any:
        if key in IDS and isinstance(value, str):
            return self._first_id(value)
        if key in TIMES and isinstance(value, int | float):
            return self._times.setdefault(key, value)
        return self._renamed(value)

    def _first_id(self, object_id: str) -> str:
        """Return the id of the first stream with the same position in order of appearance."""
        if object_id not in self._own_ids:
            position = len(self._own_ids)
            if position == len(self._ids):
                self._ids.append(object_id)
            self._own_ids[object_id] = self._ids[position]
        return self._own_ids[object_id]

    def _reduce(self, node: dict[str, Any], place: Place) -> tuple[dict[str, Any], bool]:
        """Return the part of an object that the client lacks, and whether any of it is new."""
        kept: dict[str, Any] = {}
        any_new = False
        for key, value in node.items():
            if (key in ONCE and not self._is_lines) or (key in IDS and place):
                is_new = value is not None and self._once((*place, key))
                if is_new or key.endswith("_reason"):
                    kept[key] = self._constant(key, value) if is_new else None
            else:
                kept[key], is_new = self._reduce_value(key, value, (*place, key))
            any_new = any_new or is_new
        return kept, any_new

    def _reduce_value(self, key: str, value: Any, place: Place) -> tuple[Any, bool]:
        if value is None or key in IDS or key in TIMES:
            return self._constant(key, value), False
        if key in TEXTS and isinstance(value, str):
            new = self._new_text(place, value)
            return new, bool(new)
        if key in SUMMARIES:
            return value, False
        if isinstance(value, dict):
            return self._reduce(value, place)
        if isinstance(value, list):
            return self._reduce_list(value, place)
        return value, False

    def _reduce_list(self, items: list[Any], place: Place) -> tuple[list[Any], bool]:
        if place[-1] == "rounds":
            kept = [item for item in items if self._is_next_round(item, place)]
        elif all(isinstance(item, dict) and "index" in item for item in items):
            parts = [self._reduce(item, (*place, item["index"])) for item in items]
            kept = [part for part, is_new in parts if is_new]
        else:
            # one item per token: log-probabilities
            read = self._read_counts.get(place, 0)
            known = max(0, self._counts.get(place, 0) - read)
            kept = items[known:]
            self._read_counts[place] = read + len(items)
            self._counts[place] = max(self._counts.get(place, 0), read + len(items))
        return kept, bool(kept)

    def _is_next_round(self, item: dict[str, Any], place: Place) -> bool:
        """Whether a round begins after the rounds that were sent; rounds of another replica may be cut elsewhere."""
        key, position = (*place, item.get("index", 0)), item.get("position", 0)
        if position < self._counts.get(key, 0):
            return False
        self._counts[key] = position + 1
        return True

    def _new_text(self, place: Place, text: str) -> str:
        sent, read = self._texts.get(place, ""), self._read_texts.get(place, 0)
        known = sent[read : read + len(text)]
        if not text.startswith(known):
            raise DivergedError(
                "the replica that took over wrote another text than the one that was lost: repeat the request"
            )
        self._read_texts[place] = read + len(text)
        if new := text[len(known) :]:
            self._texts[place] = sent + new
        return new

    def _once(self, place: Place) -> bool:
        is_new = place not in self._sent
        self._sent.add(place)
        return is_new


def _parse(event: str) -> tuple[str, dict[str, Any] | None]:
    """Return the name and the JSON object of a server-sent event; None for other data."""
    name, lines = "", []
    for line in event.split("\n"):
        field, _, value = line.partition(":")
        if field == "event":
            name = value.removeprefix(" ")
        elif field == "data":
            lines.append(value.removeprefix(" "))
    return name, _object_of("\n".join(lines))


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        data = parse_json(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How an endpoint answers. The stream of a generated text can be resumed, and refusals are repeated."""

    is_generating: bool = False
    is_lines: bool = False
    shape: Shape = openai_shape


OTHER = Endpoint()
GENERATING = {
    route.path: Endpoint(
        is_generating=True,
        is_lines=LineStream.media_type in route.responses[200]["content"],
        shape=getattr(route, "error_shape", openai_shape),
    )
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute) and 200 in route.responses and "POST" in (route.methods or ())
}
STREAMS = {EventStream.media_type.encode(): b"\n\n", LineStream.media_type.encode(): b"\n"}
REFUSED_STATUS = 503
BUSY_STATUS = 429
ENDING = (unavailable("shutting_down"), unavailable("process_lost"))
"""Errors with which a replica that ends gives up its streams."""
REPLICA_HEADER = b"x-draftree-replica"  # header with the id of the replica that began the answer
REPLACED_HEADERS = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"date", b"server", b"x-request-id"})
"""Headers that Ray's HTTP proxy adds to every answer; the request id is the one that the replica got."""


class ReplicaLostError(Exception):
    """A replica ended before its answer, or refused a request that another one may accept."""

    def __init__(self, reason: str, replica: str | None = None) -> None:
        super().__init__(reason)
        self.replica = replica


@final
class Delivery:
    """Sends an answer. A stream is sent as it comes, any other answer when it is complete."""

    def __init__(self, send: Send, endpoint: Endpoint) -> None:
        self._send = send
        self._endpoint = endpoint
        self._record = StreamRecord(is_lines=endpoint.is_lines)
        self._has_started = False
        self.restart()

    def restart(self) -> None:
        self._start: AnswerStart | None = None
        self._separator = b""
        self._waiting = b""
        if self._has_started:
            self._record.restart()

    async def start(self, start: AnswerStart) -> None:
        may_repeat = self._endpoint.is_generating and (self._has_started or start.status == REFUSED_STATUS)
        if may_repeat and start.status in (REFUSED_STATUS, BUSY_STATUS):
            raise ReplicaLostError(f"status {start.status}", start.replica)
        self._start = start
        types = [value.partition(b";")[0] for name, value in start.headers if name.lower() == b"content-type"]
        self._separator = STREAMS.get(types[0], b"") if types else b""
        if self._separator and not self._has_started:
            await self._send_start(start)

    async def push(self, chunk: bytes) -> None:
        self._waiting += chunk
        if not self._separator:
            return
        assert self._start is not None, "events follow the start"
        *events, self._waiting = self._waiting.split(self._separator)
        forwarded: list[bytes] = []
        try:
            for event in map(bytes.decode, events):
                kept: str | None = event
                if self._endpoint.is_generating:
                    if _is_ending(event):
                        raise ReplicaLostError("the replica ends", self._start.replica)
                    kept = self._record.push(event)
                if kept is not None:
                    forwarded.append(kept.encode() + self._separator)
        finally:
            # what is recorded is sent, also if a later event of the chunk is refused
            if forwarded:
                await self._send_body(b"".join(forwarded))

    async def finish(self) -> None:
        assert self._start is not None, "an answer starts before it ends"
        body = self._waiting
        if not self._separator and self._has_started:
            # the client has a part of a stream, and another replica answers with an error
            body = self._last_event(self._waiting.decode(errors="replace"))
        elif not self._separator:
            await self._send_start(self._start)
        await self._send_body(body, is_last=True)

    async def fail(self, error: ApiError) -> None:
        """Send an error instead of what is missing."""
        error.shape = self._endpoint.shape
        if self._has_started:
            body = self._last_event(json.dumps(error.body()))
        else:
            response = error.response()
            await self._send_start(AnswerStart(response.status_code, list(response.raw_headers), ""))
            body = bytes(response.body)
        await self._send_body(body, is_last=True)

    def _last_event(self, error: str) -> bytes:
        if self._endpoint.is_lines:
            return f"{error}\n".encode()
        if self._endpoint.shape is openai_shape:
            return f"data: {error}\n\ndata: {DONE}\n\n".encode()
        return f"event: error\ndata: {error}\n\n".encode()

    async def _send_start(self, start: AnswerStart) -> None:
        self._has_started = True
        headers: Headers = [item for item in start.headers if item[0].lower() not in REPLACED_HEADERS]
        if start.replica:
            headers.append((REPLICA_HEADER, start.replica.encode()))
        await self._send({"type": "http.response.start", "status": start.status, "headers": headers})

    async def _send_body(self, body: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _is_ending(event: str) -> bool:
    if not any(known.message in event or str(known.code) in event for known in ENDING):
        return False
    data = _object_of(event) or _parse(event)[1] or {}
    error = data.get("error")
    fields = error if isinstance(error, dict) else {"message": error}
    return any(fields.get("code") == known.code or fields.get("message") == known.message for known in ENDING)


SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.+)", re.ASCII)
REPEATED = "draftree_repeated_requests_total"


def merged_metrics(texts: Mapping[str, str], *, num_repeated: int) -> str:
    """Return the samples of all replicas in Prometheus' text format, by metric."""
    heads: defaultdict[str, dict[str, None]] = defaultdict(dict)
    samples: defaultdict[str, list[str]] = defaultdict(list)
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                heads[family][line] = None
            elif (sample := SAMPLE.fullmatch(line)) is not None:
                name, labels, value = sample.groups()
                samples[family].append(f'{name}{{{f"{labels}," if labels else ""}replica="{replica}"}} {value}')
    lines = [line for family in samples for line in (*heads[family], *samples[family])]
    lines += [f"# HELP {REPEATED} Requests that were repeated on another replica", f"# TYPE {REPEATED} counter"]
    return "\n".join([*lines, f"{REPEATED} {num_repeated}"]) + "\n"


SUMMED = ("running", "waiting", "tokens_per_second")
AVERAGED = ("acceptance_length", "acceptance_rate")


def merged_status(texts: Mapping[str, str]) -> str:
    """Return the status of all replicas as one of the same form.

    Models are those of the first replica, with their summed load. `replicas` has the ids of the replicas.
    """
    each = [json.loads(text) for text in texts.values()]
    first = each[0]
    merged = first | {
        "models": [_model(model, each) for model in first["models"]],
        "queue": {name: sum(status["queue"][name] for status in each) for name in first["queue"]},
        "is_ready": any(status["is_ready"] for status in each),
        "uptime_seconds": max(status["uptime_seconds"] for status in each),
        "replicas": list(texts),
    }
    return json.dumps(merged, separators=(",", ":"))


def _model(model: dict[str, Any], each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the status of a model with its summed load, and rates weighted by tokens."""
    rows = [row for status in each for row in status["models"] if row["name"] == model["name"]]
    merged = model | {name: sum(row[name] for row in rows) for name in SUMMED}
    for name in AVERAGED:
        known = [(row[name], row["tokens_per_second"]) for row in rows if row[name] is not None]
        weight = sum(tokens for _, tokens in known)
        merged[name] = sum(value * tokens for value, tokens in known) / weight if weight else None
    return merged


logger = logging.getLogger(__name__)

METRICS, STATUS = "/metrics", "/draftree/status"
REQUEST_ID = b"x-request-id"
OK = 200
CONVERSATIONS = "/v1/responses/"  # endpoints that read stored conversations without generating
SEED_BITS = 62
FRESH_SEEDS = (None, -1)


class Replicas(Protocol):
    """The replicas, as the proxy uses them."""

    def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
        """Yield the answer of one replica; its start first."""

    async def everywhere(self, request: HttpRequest) -> list[list[Part]]:
        """Return the complete answers of all replicas that give one."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a request is repeated: within `window` seconds of the first loss, at once and then after doubling pauses."""

    window: float = 120.0
    first_pause: float = 0.1
    longest_pause: float = 2.0


@final
class Proxy:
    """The app, for HTTP requests with each body in one message, as behind `BodyLimit`."""

    def __init__(self, replicas: Replicas, *, retry: RetryPolicy | None = None) -> None:
        self._replicas = replicas
        self._retry = retry or RetryPolicy()
        self.num_repeated = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, endpoint = prepared(scope, (await receive())["body"])
        delivery = Delivery(send, endpoint)
        merges = scope["method"] == "GET" and scope["path"] in (METRICS, STATUS)
        work = self._answer_of_all if merges else self._answer
        try:
            await unless_gone(receive, work(request, delivery))
        except ClientGoneError:
            return
        except Exception as error:  # its text is only logged
            await delivery.fail(api_error(error))

    async def _answer(self, request: HttpRequest, delivery: Delivery) -> None:
        """Deliver the answer of the first replica that completes it."""
        clock = asyncio.get_running_loop().time
        failed: set[str] = set()
        deadline, pause = None, 0.0
        while True:
            try:
                await self._attempt(replace(request, avoid=frozenset(failed)), delivery)
                return
            except DivergedError as error:
                await delivery.fail(ApiError(500, str(error), code="diverged"))
                return
            except ReplicaLostError as lost:
                deadline = deadline or clock() + self._retry.window
                self.num_repeated += 1
                logger.warning("repeating %s on another replica: %s", request.scope["path"], lost)
                failed = failed | {lost.replica} if lost.replica else failed
            if clock() + pause > deadline:
                await delivery.fail(unavailable("no_replica"))
                return
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, self._retry.first_pause), self._retry.longest_pause)

    async def _answer_of_all(self, request: HttpRequest, delivery: Delivery) -> None:
        """Deliver the metrics or the status of all replicas, or the refusal of one."""
        texts: dict[str, str] = {}
        start, body = None, b""
        for parts in await self._replicas.everywhere(request):
            start = next(part for part in parts if isinstance(part, AnswerStart))
            body = b"".join(part for part in parts if isinstance(part, bytes))
            if start.status != OK:
                break
            texts[start.replica] = body.decode()
        else:
            if texts and request.scope["path"] == STATUS:
                body = merged_status(texts).encode()
            elif texts:
                body = merged_metrics(texts, num_repeated=self.num_repeated).encode()
        if start is None:
            await delivery.fail(unavailable("no_replica"))
            return
        headers = [item for item in start.headers if item[0].lower() != b"content-length"]
        await delivery.start(AnswerStart(start.status, headers, ""))
        await delivery.push(body)
        await delivery.finish()

    async def _attempt(self, request: HttpRequest, delivery: Delivery) -> None:
        delivery.restart()
        replica = None
        async with aclosing(self._replicas.stream(request)) as parts:
            try:
                async for part in parts:
                    if isinstance(part, AnswerStart):
                        replica = part.replica
                        await delivery.start(part)
                    else:
                        await delivery.push(part)
            except ReplicaLostError as lost:
                raise ReplicaLostError(str(lost), lost.replica or replica) from lost
        await delivery.finish()


def prepared(scope: Scope, body: bytes) -> tuple[HttpRequest, Endpoint]:
    """Return the request for the replicas, and its endpoint.

    A streamed request without a seed gets a random one, and a request without an id gets one, so that repetitions have
    the same. Bodies that are no JSON objects are forwarded as they are: the replica refuses them.
    """
    plain = picklable_scope(scope)
    if all(name.lower() != REQUEST_ID for name, _ in plain["headers"]):
        plain["headers"].append((REQUEST_ID, request_id_of(None).encode()))
    request = HttpRequest(plain, body)
    endpoint = GENERATING.get(scope["path"], OTHER) if scope["method"] == "POST" else OTHER
    if endpoint is OTHER and not scope["path"].startswith(CONVERSATIONS):
        return request, OTHER
    try:
        fields = parse_json_object(body)
    except JsonError:
        return request, replace(endpoint, is_generating=False)
    request = replace(request, holder=holder_of(fields))
    if endpoint is OTHER:
        return request, OTHER
    # in Ollama's protocol, answers are streamed by default
    options = fields.get("options") or {} if endpoint.is_lines else fields
    is_streamed = fields.get("stream", endpoint.is_lines) is True
    if is_streamed and isinstance(options, dict) and options.get("seed") in FRESH_SEEDS:
        seeded = options | {"seed": secrets.randbits(SEED_BITS)}
        seeded_body = json.dumps(fields | {"options": seeded} if endpoint.is_lines else seeded, separators=(",", ":"))
        headers = [(name, value) for name, value in plain["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(seeded_body)).encode()))
        request = replace(request, scope=plain | {"headers": headers}, body=seeded_body.encode())
    return replace(request, blocks=prefix_blocks(fields)), endpoint
