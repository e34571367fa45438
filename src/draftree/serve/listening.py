"""The socket of a server, and the connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import re
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftree.core.errors import ConfigurationError
from draftree.core.host import SYSTEM_CLOCK
from draftree.serve.settings import ServerSettings

logger = logging.getLogger(__name__)

BACKLOG = 2048
MANY = 2**20
NOTICE_SECONDS = 60.0
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: text/plain\r\n"
    b"content-length: 20\r\n\r\ntoo many connections"
)
SOCKET_MODE = 0o660
MAX_HEAD_BYTES = 65536
AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")


@contextmanager
def listen(settings: ServerSettings) -> Iterator[socket.socket]:
    """Return the socket of a server, bound but not yet accepting."""
    if settings.uds is not None:
        with _unix_socket(Path(settings.uds)) as listener:
            yield listener
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(f"--host {settings.host}", error) from error
    with contextlib.closing(listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigurationError(
                    f"port {settings.port} of {settings.host} is in use: choose another with --port; 0 takes a free one"
                ) from error
            raise _cannot_listen(f"--host {settings.host} --port {settings.port}", error) from error
        yield listener


@contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        if path.exists():
            _remove_stale(path)
        try:
            listener.bind(str(path))
            path.chmod(SOCKET_MODE)
            listener.listen(BACKLOG)
        except OSError as error:
            raise _cannot_listen(f"--uds {path}", error) from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove a socket that a server left, but no other file."""
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigurationError(f"--uds {path} is a file that is not a socket: choose another path")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise _cannot_listen(f"--uds {path}", error) from error
    raise ConfigurationError(f"--uds {path} is in use by another process: choose another path")


def _cannot_listen(what: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{what} cannot be listened on: {error.strerror}; choose another address")


def url_of(listener: socket.socket, *, scheme: str = "http") -> str:
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix:{address}:"
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_options(settings: ServerSettings) -> dict[str, str]:
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return {}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is an OSError
        reason = error.strerror or (str(error).splitlines() or [""])[0]
        raise ConfigurationError(
            f"tls_certificate {certificate} and tls_key {key} cannot be used ({reason}): both must be PEM files that "
            "belong together, and the key must have no password"
        ) from error
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connections for which this process has descriptors: most open ones, and most that are accepted before counting
    again.
    """

    most: int
    at_once: int

    @classmethod
    def of_process(cls) -> ConnectionLimits:
        try:
            import resource  # which Windows lacks
        except ImportError:
            free = 8 * BACKLOG
        else:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            soft = MANY if soft == resource.RLIM_INFINITY else min(soft, MANY)
            free = soft // 2
            with contextlib.suppress(OSError):
                free = max(0, soft - len(os.listdir("/dev/fd")))
        return cls(most=max(1, free * 5 // 8), at_once=max(1, min(BACKLOG, free // 8)))


class FullNotice:
    """The log line about connections that were not accepted: at most one a minute."""

    def __init__(self) -> None:
        self._next = -math.inf

    def __call__(self, reason: str) -> None:
        now = SYSTEM_CLOCK()
        if now >= self._next:
            self._next = now + NOTICE_SECONDS
            logger.warning("connections are refused: %s; raise the limit of descriptors (ulimit -n)", reason)

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of the event loop, which accepts again a second after the descriptors were used up."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self(error.strerror or str(error))
        else:
            loop.default_exception_handler(context)


class StrictConnection(h11.Connection):
    """Refuses request heads that other HTTP software may divide into other requests.

    These are bare line feeds, folded header lines, and a length beside chunks (RFC 9112, sections 2.2, 5.2 and 6.3).
    """

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            data, _ = self.trailing_data
            ends = [place for blank in (b"\n\n", b"\n\r\n") if (place := data.find(blank)) >= 0]
            if ends and AMBIGUOUS.search(data, 0, min(ends) + 3):
                raise h11.RemoteProtocolError("a line feed without carriage return, or a folded header line")
        event = super().next_event()
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
            raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        return event


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that refuses too many connections, and closes those whose request head does not arrive in time."""

    head_timeout = 30.0
    max_connections = MANY
    notice = FullNotice()
    _timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = StrictConnection(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.max_connections:
            self._is_refused = True
            self.notice(f"{len(self.connections)} are open")
            transport.write(FULL)
            transport.close()
            return
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        if not self._is_refused:
            super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
