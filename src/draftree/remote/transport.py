"""Transports of frames: one WebSocket, or one POST request for each frame."""

from __future__ import annotations

import asyncio
import http.client
import logging
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, TypeVar, final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException

from draftree.core.errors import ConfigurationError
from draftree.core.files import expanded
from draftree.remote.address import ConnectionLostError, RefusedError, RemoteAddress
from draftree.remote.protocol import MAX_REPLY_BYTES

T = TypeVar("T")

quiet = logging.getLogger(f"{__name__}.websocket")
quiet.setLevel(logging.CRITICAL)  # lost connections become errors of this package, which are shown once
PATH = "/v1/verify"  # path of the WebSocket, and of POST requests with one frame each
CONTENT_TYPE = "application/msgpack"
UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 401, 403, 404
NO_KEY = b"missing_api_key"  # code of the server's answer to a request without a key
OK = 200
SILENCE = 10.0  # seconds for connecting, and for the answer to a ping
FAREWELL = 2.0  # seconds for the reply to the end of a session, and for the end of a connection
NO_UPGRADE = frozenset({400, 404, 405, 426, 500, 501, 502})
"""Answers of servers and proxies that do not pass WebSockets."""


class Transport(ABC):
    """A connection to a verify server. For one thread.

    `bytes_up`: bytes of frames sent. `bytes_down`: bytes of frames received.
    """

    needs_session = False  # whether every frame must name its session

    def __init__(self, timeout: float = 0.0) -> None:
        self.bytes_up = self.bytes_down = 0
        self._timeout = timeout

    @abstractmethod
    def exchange(self, frame: bytes) -> bytes:
        """Send a frame and return the next reply, which may be the late reply to an earlier frame.

        Raises:
            ConnectionLostError: the connection ended or timed out.
            RefusedError: the server refuses the connection.
        """

    @abstractmethod
    def receive(self) -> bytes:
        """Return one more reply to the last frame; raises as `exchange`."""

    def hasten(self) -> None:
        """Wait for later replies for `FAREWELL` seconds at most."""
        self._timeout = FAREWELL

    @abstractmethod
    def close(self) -> None:
        """End the connection."""


@final
class WebSocketTransport(Transport):
    """Binary frames over one WebSocket.

    A server whose replies take long answers a ping within `silence` seconds; one that hangs, or whose packets are
    lost, does not.
    """

    def __init__(self, address: RemoteAddress, key: str | None, *, timeout: float, silence: float = SILENCE) -> None:
        super().__init__(timeout)
        context = tls_context(address)
        # An event loop of its own answers pings between exchanges, and every wait on it can end. The library's blocking
        # client cannot end a read inside a TLS record, or a write to a server that does not read.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="draftree-websocket", daemon=True)
        self._thread.start()
        try:
            with ExitStack() as stack:
                stack.callback(self._end)
                self._connection = self._result(_opened(address, key, context, silence))
                stack.pop_all()
        except InvalidStatus as error:
            raise _refusal(error.response.status_code, bytes(error.response.body or b""), websocket=True) from error
        except ssl.SSLCertVerificationError as error:
            raise _untrusted(address, error) from error
        except (OSError, InvalidHandshake, WebSocketException, EOFError) as error:
            raise ConnectionLostError(f"no connection to {address}: {_first_line(error)}") from error

    def exchange(self, frame: bytes) -> bytes:
        return self._reply(frame)

    def receive(self) -> bytes:
        return self._reply(None)

    def _reply(self, frame: bytes | None) -> bytes:
        async def conversed() -> str | bytes:
            async with asyncio.timeout(self._timeout):
                if frame is not None:
                    await self._connection.send(frame)
                    self.bytes_up += len(frame)
                return await self._connection.recv()

        if not self._thread.is_alive():  # closed, or a copy in a forked process
            raise ConnectionLostError("the connection ended")
        try:
            reply = self._result(conversed())
        except (WebSocketException, OSError, EOFError) as error:  # TimeoutError is an OSError
            raise ConnectionLostError(f"the connection ended: {_first_line(error)}") from error
        if isinstance(reply, str):
            raise ConnectionLostError("the server sent a text frame: it is not a verify server")
        self.bytes_down += len(reply)
        return reply

    def close(self) -> None:
        if self._thread.is_alive():
            try:
                with suppress(WebSocketException, OSError, EOFError):
                    self._result(_closed(self._connection))
            finally:
                self._end()

    def _result(self, step: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(step, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # a wait that a signal interrupted

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _opened(
    address: RemoteAddress, key: str | None, context: ssl.SSLContext | None, silence: float
) -> ClientConnection:
    return await connect(
        address.url(PATH, websocket=True),
        additional_headers=_headers(key),
        compression=None,
        open_timeout=silence,
        ping_interval=silence,
        ping_timeout=silence,
        close_timeout=1.0,
        max_size=MAX_REPLY_BYTES,
        user_agent_header=None,
        proxy=None,
        logger=quiet,
        ssl=context,
    )


async def _closed(connection: ClientConnection) -> None:
    try:
        async with asyncio.timeout(FAREWELL):  # closing waits for a write to a server that does not read
            await connection.close()
    finally:
        connection.transport.abort()
        await connection.wait_closed()


@final
class PostTransport(Transport):
    """One POST request per frame, over a connection that is kept."""

    needs_session = True

    def __init__(self, address: RemoteAddress, key: str | None, *, timeout: float, silence: float = SILENCE) -> None:
        super().__init__(timeout)
        self._address, self._headers = address, _headers(key)
        self._connection = _connection(address, silence)

    def exchange(self, frame: bytes) -> bytes:
        headers = {**self._headers, "content-type": CONTENT_TYPE, "accept": CONTENT_TYPE}
        with _errors_of(self._address, self._connection):
            if self._connection.sock is None:
                self._connection.connect()
            self._connection.sock.settimeout(self._timeout)  # connecting and replies have limits of their own
            self._connection.request("POST", f"{self._address.path}{PATH}", body=frame, headers=headers)
            response = self._connection.getresponse()
            body = response.read(MAX_REPLY_BYTES + 1)
        self.bytes_up += len(frame)
        self.bytes_down += len(body)
        if response.status != OK or response.getheader("content-type") != CONTENT_TYPE:
            raise _refusal(response.status, body)
        return body

    def receive(self) -> bytes:
        """Raise: a POST request has one reply."""
        raise ConnectionLostError("the reply belongs to another request")

    def close(self) -> None:
        self._connection.close()


def open_transport(address: RemoteAddress, key: str | None, *, timeout: float, silence: float = SILENCE) -> Transport:
    """Connect by the transport of the address: for "auto" by WebSocket, or by POST if the server offers none."""
    if address.transport == "post":
        return PostTransport(address, key, timeout=timeout, silence=silence)
    try:
        return WebSocketTransport(address, key, timeout=timeout, silence=silence)
    except RefusedError as error:
        if error.code != "no_websocket" or address.transport == "websocket":
            raise
        return PostTransport(address, key, timeout=timeout, silence=silence)


def fetch(address: RemoteAddress, key: str | None, path: str, *, timeout: float, max_bytes: int) -> bytes:
    connection = _connection(address, timeout)
    with closing(connection), _errors_of(address, connection):
        connection.request("GET", f"{address.path}{path}", headers=_headers(key))
        response = connection.getresponse()
        body = response.read(max_bytes + 1)
    if response.status != OK:
        raise _refusal(response.status, body)
    if len(body) > max_bytes:
        raise RefusedError(f"{address}{path} has more than {max_bytes} bytes", code="too_large")
    return body


def _connection(address: RemoteAddress, timeout: float) -> http.client.HTTPConnection:
    context = tls_context(address)
    if context is not None:
        return http.client.HTTPSConnection(address.host, address.port, timeout=timeout, context=context)
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout)


def tls_context(address: RemoteAddress) -> ssl.SSLContext | None:
    """Return the context of an encrypted connection, which checks certificate and name; None for plain HTTP."""
    if address.scheme != "https":
        return None
    if address.ca is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=expanded(address.ca))
    except OSError as error:  # SSLError is an OSError
        raise ConfigurationError(
            f"ca={address.ca} cannot be read ({_first_line(error)}): name a PEM file with the certificate of the "
            "server or of its authority"
        ) from error


@contextmanager
def _errors_of(address: RemoteAddress, connection: http.client.HTTPConnection) -> Iterator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise _untrusted(address, error) from error
    except (OSError, http.client.HTTPException) as error:
        connection.close()  # the next request connects again
        raise ConnectionLostError(f"no answer from {address}: {_first_line(error)}") from error


def _untrusted(address: RemoteAddress, error: ssl.SSLCertVerificationError) -> RefusedError:
    text = (
        f"the certificate of {address} is not trusted ({error.verify_message}): name a file with the certificate of "
        "its authority, remote:URL?ca=FILE"
    )
    return RefusedError(text, code="untrusted")


def _headers(key: str | None) -> Mapping[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _refusal(status: int, body: bytes, *, websocket: bool = False) -> RefusedError:
    """Return the error of an HTTP answer other than a frame."""
    if status in (UNAUTHORIZED, FORBIDDEN):
        problem = "needs an API key: set it" if NO_KEY in body else "refuses the API key: set the right one"
        return RefusedError(f"the server {problem} in DRAFTREE_API_KEY", code="unauthorized")
    if websocket and status in NO_UPGRADE:
        return RefusedError(f"the server offers no WebSocket (status {status})", code="no_websocket")
    if status == NOT_FOUND:
        text = "the server does not verify drafts: start it with 'draftree verify-server'"
        return RefusedError(text, code="not_found")
    shown = body[:200].decode("utf-8", "replace")
    retry = 1000 if status in (429, 503) else None
    return RefusedError(f"the server answered with status {status}: {shown}", code=f"http_{status}", retry_ms=retry)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
