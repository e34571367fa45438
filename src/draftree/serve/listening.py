"""The socket of a server, and the connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftree.core.errors import ConfigurationError
from draftree.serve.settings import ServerSettings

__all__ = ["TimedProtocol", "listen", "tls_options", "url_of"]

BACKLOG = 2048
SOCKET_MODE = 0o660


@contextmanager
def listen(settings: ServerSettings) -> Iterator[socket.socket]:
    """Return the socket of a server, bound but not yet accepting.

    Raises:
        ConfigurationError: the address is in use, or cannot be used.
    """
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
    """Return the URL of a socket."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix:{address}:"
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_options(settings: ServerSettings) -> dict[str, str]:
    """Return uvicorn's options for HTTPS; none without a certificate.

    Raises:
        ConfigurationError: certificate or key cannot be read, or do not belong together.
    """
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


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes connections whose request head does not arrive in time."""

    head_timeout = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        self._stop()
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
