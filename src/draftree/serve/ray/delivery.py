"""The answer that one client gets, composed of the answers of one or more replicas. Needs no ray."""

from __future__ import annotations

import json
from typing import final

from draftree.core.files import parse_json
from draftree.serve.errors import ApiError
from draftree.serve.ray.resume import DONE, StreamRecord
from draftree.serve.ray.wire import AnswerStart, Headers, Send

EVENT_STREAM = b"text/event-stream"
REFUSED_STATUS = 503
BUSY_STATUS = 429
ENDING = ("shutting_down", "process_lost")
"""Codes of errors with which a replica that ends gives up its streams."""
REPLICA_HEADER = b"x-draftree-replica"
"""Header with the id of the replica that began the answer."""
REPLACED_HEADERS = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"date", b"server", b"x-request-id"})
"""Headers that Ray's HTTP proxy adds to every answer; the request id is the one that the replica got."""


class RefusedError(Exception):
    """A replica refused a request that another one may accept.

    Args:
        reason: for the log.
        replica: its id.
    """

    def __init__(self, reason: str, replica: str) -> None:
        super().__init__(reason)
        self.replica = replica


@final
class Delivery:
    """Sends an answer. An event stream is sent as it comes, any other answer when it is complete.

    Args:
        send: the ASGI callable of the client.
        is_generating: whether the answer is a generated text: its stream can be resumed, and refusals are repeated.
    """

    def __init__(self, send: Send, *, is_generating: bool) -> None:
        self._send = send
        self._is_generating = is_generating
        self._record = StreamRecord()
        self._has_started = self._is_over = False
        self.restart()

    def restart(self) -> None:
        """Begin with the answer of another replica."""
        self._start: AnswerStart | None = None
        self._is_stream = False
        self._waiting = b""
        if self._has_started:
            self._record.restart()

    async def start(self, start: AnswerStart) -> None:
        """Take status and headers.

        Raises:
            RefusedError: the replica cannot take the request, and another one may.
        """
        may_repeat = self._is_generating and (self._has_started or start.status == REFUSED_STATUS)
        if may_repeat and start.status in (REFUSED_STATUS, BUSY_STATUS):
            raise RefusedError(f"status {start.status}", start.replica)
        self._start = start
        self._is_stream = any(
            name.lower() == b"content-type" and value.startswith(EVENT_STREAM) for name, value in start.headers
        )
        if self._is_stream and not self._has_started:
            await self._send_start(start)

    async def push(self, chunk: bytes) -> None:
        """Take a chunk of the body.

        Raises:
            RefusedError: the replica ends the stream because it shuts down.
            DivergedError: as `StreamRecord.push`.
        """
        self._waiting += chunk
        if not self._is_stream:
            return
        *events, self._waiting = self._waiting.split(b"\n\n")
        forwarded: list[str] = []
        try:
            for event in events:
                if (kept := self._kept(event.decode())) is not None:
                    forwarded.append(f"{kept}\n\n")
        finally:
            # what is recorded is sent, also if a later event of the chunk is refused
            if forwarded:
                await self._send_body("".join(forwarded).encode())

    async def finish(self) -> None:
        """Take the end of the body."""
        assert self._start is not None, "an answer starts before it ends"
        if not self._is_stream and self._has_started:
            # the client has a part of a stream, and another replica answers with an error
            message = self._waiting.decode(errors="replace")
            await self._send_body(f"data: {message}\n\ndata: {DONE}\n\n".encode())
        elif not self._is_stream:
            await self._send_start(self._start)
            await self._send_body(self._waiting)
        elif self._waiting:
            await self._send_body(self._waiting)
        await self._send_end()

    async def fail(self, error: ApiError) -> None:
        """Send an error instead of what is missing."""
        response = error.response()
        if self._has_started:
            await self._send_body(f"data: {json.dumps(error.body())}\n\ndata: {DONE}\n\n".encode())
        else:
            await self._send_start(AnswerStart(response.status_code, list(response.raw_headers), ""))
            await self._send_body(bytes(response.body))
        await self._send_end()

    def _kept(self, event: str) -> str | None:
        if not self._is_generating:
            return event
        if any(code in event for code in ENDING) and _error_code(event) in ENDING:
            assert self._start is not None, "events follow the start"
            raise RefusedError("the replica ends", self._start.replica)
        return self._record.push(event)

    async def _send_start(self, start: AnswerStart) -> None:
        self._has_started = True
        headers: Headers = [item for item in start.headers if item[0].lower() not in REPLACED_HEADERS]
        if start.replica:
            headers.append((REPLICA_HEADER, start.replica.encode()))
        await self._send({"type": "http.response.start", "status": start.status, "headers": headers})

    async def _send_body(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _error_code(event: str) -> str | None:
    """Return the code of an error event; None for other events."""
    for line in event.split("\n"):
        if line.startswith("data:"):
            try:
                data = parse_json(line.removeprefix("data:"))
            except ValueError:
                return None
            error = data.get("error") if isinstance(data, dict) else None
            return error.get("code") if isinstance(error, dict) else None
    return None
