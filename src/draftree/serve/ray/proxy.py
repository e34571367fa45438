"""ASGI app in front of the replicas: forwards requests, and repeats those of lost replicas. Needs no ray.

A request is repeated on another replica while the client has nothing of its answer. Of a streamed text, the client has
a beginning: the request is repeated with the same seed, and `StreamRecord` removes that beginning. A streamed request
without a seed gets one here, so that its text can be repeated. An answer that is no event stream is sent when it is
complete. `/metrics` and `/draftree/status` are merged from the answers of all replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from draftree.core.files import JsonError, parse_json_object
from draftree.serve.errors import ApiError, api_error
from draftree.serve.ray.delivery import Delivery, RefusedError
from draftree.serve.ray.exposition import merged_metrics
from draftree.serve.ray.prefixes import prefix_blocks
from draftree.serve.ray.resume import DivergedError
from draftree.serve.ray.status import merged_status
from draftree.serve.ray.wire import AnswerStart, HttpRequest, Part, Receive, Scope, Send, picklable_scope
from draftree.serve.records import request_id_of

logger = logging.getLogger(__name__)

METRICS, STATUS = "/metrics", "/draftree/status"
REQUEST_ID = b"x-request-id"
OK = 200
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
SEED_BITS = 62
FRESH_SEEDS = (None, -1)


class ReplicaLostError(Exception):
    """A replica ended before its answer.

    Args:
        reason: for the log.
        replica: its id, if known.
    """

    def __init__(self, reason: str, replica: str | None = None) -> None:
        super().__init__(reason)
        self.replica = replica


class Replicas(Protocol):
    """The replicas, as the proxy uses them."""

    def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
        """Yield the answer of one replica; its start first.

        Raises:
            ReplicaLostError: the replica ended before its answer.
        """

    async def everywhere(self, request: HttpRequest) -> list[list[Part]]:
        """Return the complete answers of all replicas that give one."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a request is repeated. Times are seconds.

    Attributes:
        window: time from the first loss in which a request is repeated.
        first_pause: pause before the second repetition; the first one follows at once.
        longest_pause: pauses double up to this.
    """

    window: float = 120.0
    first_pause: float = 0.1
    longest_pause: float = 2.0


@final
class Proxy:
    """The app.

    Args:
        replicas: the replicas.
        max_body_bytes: size of a request's body.
        body_timeout: seconds in which a body must arrive.
        retry: when requests are repeated.

    Attributes:
        num_repeated: repetitions since the start.
    """

    def __init__(
        self, replicas: Replicas, *, max_body_bytes: int, body_timeout: float, retry: RetryPolicy | None = None
    ) -> None:
        self._replicas = replicas
        self._body_timeout = body_timeout
        self._max_body_bytes = max_body_bytes
        self._retry = retry or RetryPolicy()
        self.num_repeated = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; the ASGI interface."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"the proxy handles HTTP requests only, not '{scope['type']}'")
        try:
            body = await asyncio.wait_for(self._read(receive), self._body_timeout)
        except TimeoutError:
            text = f"the body did not arrive within {self._body_timeout:g} s: send it at once"
            await _send_error(ApiError(408, text, code="body_timeout"), send)
            return
        except ApiError as error:
            await _send_error(error, send)
            return
        if body is None:
            return
        request, is_generating = prepared(scope, body)
        delivery = Delivery(send, is_generating=is_generating)
        merges = scope["method"] == "GET" and scope["path"] in (METRICS, STATUS)
        work = self._answer_of_all if merges else self._answer
        answering = asyncio.create_task(_guarded(work(request, delivery), delivery))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.wait([answering, leaving])
        if not answering.cancelled():
            answering.result()

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client left."""
        chunks, size, is_last = [], 0, False
        while not is_last:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_body_bytes:
                reason = f"the body is larger than {self._max_body_bytes} bytes: send a shorter prompt"
                raise ApiError(413, reason, code="body_too_large")
            is_last = not message.get("more_body", False)
        return b"".join(chunks)

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
            except (ReplicaLostError, RefusedError) as lost:
                deadline = deadline or clock() + self._retry.window
                self.num_repeated += 1
                logger.warning("repeating %s on another replica: %s", request.scope["path"], lost)
                failed = failed | {lost.replica} if lost.replica else failed
            if clock() + pause > deadline:
                await delivery.fail(lost_error())
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
            body = self._merged(request.scope["path"], texts)
        if start is None:
            await delivery.fail(lost_error())
            return
        headers = [item for item in start.headers if item[0].lower() != b"content-length"]
        await delivery.start(AnswerStart(start.status, headers, ""))
        await delivery.push(body)
        await delivery.finish()

    def _merged(self, path: str, texts: dict[str, str]) -> bytes:
        if not texts:
            return b""
        merged = merged_status(texts) if path == STATUS else merged_metrics(texts, num_repeated=self.num_repeated)
        return merged.encode()

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


def prepared(scope: Scope, body: bytes) -> tuple[HttpRequest, bool]:
    """Return the request for the replicas, and whether it generates text.

    A streamed request without a seed gets a random one, and a request without an id gets one, so that repetitions have
    the same. Bodies that are no JSON objects are forwarded as they are: the
    replica refuses them.
    """
    plain = picklable_scope(scope)
    if all(name.lower() != REQUEST_ID for name, _ in plain["headers"]):
        plain["headers"].append((REQUEST_ID, request_id_of(None).encode()))
    request = HttpRequest(plain, body)
    if scope["method"] != "POST" or scope["path"] not in GENERATING:
        return request, False
    try:
        fields = parse_json_object(body)
    except JsonError:
        return request, False
    if fields.get("stream") is True and fields.get("seed") in FRESH_SEEDS:
        request = _with_body(request, fields | {"seed": secrets.randbits(SEED_BITS)})
    return replace(request, blocks=prefix_blocks(fields)), True


def _with_body(request: HttpRequest, fields: dict[str, Any]) -> HttpRequest:
    body = json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode()
    headers = [(name, value) for name, value in request.scope["headers"] if name.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    return replace(request, scope=request.scope | {"headers": headers}, body=body)


def lost_error() -> ApiError:
    """Return the error of a request for which no replica was left."""
    return ApiError(
        503,
        "no replica could complete this request: repeat it later",
        code="no_replica",
        headers={"Retry-After": "5"},
    )


async def _guarded(work: Coroutine[Any, Any, None], delivery: Delivery) -> None:
    """Await the work; the client gets a general error for an unexpected exception, whose text is only logged."""
    try:
        await work
    except Exception as error:
        await delivery.fail(api_error(error))


async def _send_error(error: ApiError, send: Send) -> None:
    response = error.response()
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
