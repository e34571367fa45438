"""HTTP requests to a server, with the standard library alone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from draftree.cli.watching.address import Address
from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.core.files import parse_json

__all__ = ["RefusedError", "ServerClient", "UnreachableError"]

STATUS_PATH, ROUNDS_PATH = "/draftree/status", "/draftree/rounds"
TIMEOUT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""A stream of rounds that is silent for longer is opened again; the server sends a comment more often."""
MAX_BYTES = 4_000_000
"""Largest answer or event that is read."""
UNAUTHORIZED, FORBIDDEN = 401, 403
OK, SERVER_ERROR = 200, 500


class UnreachableError(DraftreeError):
    """The server does not answer; a later attempt may succeed."""


class RefusedError(DraftreeError):
    """The server answers, but not with what is needed; a later attempt gives the same answer."""


class ServerClient:
    """Reads the status and the rounds of one server.

    Args:
        address: the server.
        key: API key; None for a server without keys.

    Raises:
        ConfigurationError: the key cannot be sent.
    """

    def __init__(self, address: Address, key: str | None) -> None:
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise ConfigurationError("the API key is empty, or contains spaces around it or characters beyond ASCII")
        self.address = address
        self._key = key

    def status(self) -> dict[str, Any]:
        """Return the server's status.

        Raises:
            UnreachableError: there is no answer.
            RefusedError: the key is wrong, or the server is another program.
        """
        with self._opened(STATUS_PATH, TIMEOUT_SECONDS) as (_, response):
            raw = self.guarded(lambda: response.read(MAX_BYTES + 1))
        return self.parsed(raw)

    @contextlib.contextmanager
    def rounds(self) -> Iterator[RoundStream]:
        """Open the stream of rounds.

        Raises:
            UnreachableError: there is no answer.
            RefusedError: the key is wrong, or the server is another program.
        """
        with self._opened(ROUNDS_PATH, SILENCE_SECONDS) as (sock, response):
            yield RoundStream(self, sock, response)

    @contextlib.contextmanager
    def _opened(self, path: str, timeout: float) -> Iterator[tuple[socket.socket, HTTPResponse]]:
        kind = HTTPSConnection if self.address.scheme == "https" else HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=timeout)
        headers = {"Accept": "application/json, text/event-stream"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"

        def send() -> tuple[socket.socket, HTTPResponse]:
            connection.request("GET", self.address.path + path, headers=headers)
            sock = connection.sock  # the connection drops it if the answer ends with it
            return sock, connection.getresponse()

        try:
            sock, response = self.guarded(send)
            self._require_ok(response)
            with response:
                yield sock, response
        finally:
            connection.close()

    def _require_ok(self, response: HTTPResponse) -> None:
        status = response.status
        if status == OK:
            return
        if status in (UNAUTHORIZED, FORBIDDEN):
            case = "requires an API key" if self._key is None else "refuses this API key"
            raise RefusedError(f"{self.address} {case}: give the right one with DRAFTREE_API_KEY or --key")
        if status >= SERVER_ERROR:
            raise UnreachableError(f"{self.address} answers with status {status}: try again later")
        raise RefusedError(
            f"{self.address} answers with status {status}, so it is not a Draftree server: check the URL"
        )

    def guarded(self, step: Any) -> Any:
        """Run a step of a request; failures of the network become one sentence."""
        try:
            return step()
        except ConnectionRefusedError as error:
            raise UnreachableError(
                f"nothing listens at {self.address}: check host and port, or start 'draftree serve MODEL'"
            ) from error
        except socket.gaierror as error:
            raise UnreachableError(f"the host '{self.address.host}' is unknown: check the URL") from error
        except TimeoutError as error:
            raise UnreachableError(f"{self.address} does not answer in time: check that the server runs") from error
        except HTTPException as error:
            raise UnreachableError(
                f"{self.address} does not speak HTTP ({type(error).__name__}): check the scheme and the port"
            ) from error
        except OSError as error:
            raise UnreachableError(f"{self.address} cannot be reached: {error.strerror or error}") from error

    def parsed(self, raw: bytes) -> dict[str, Any]:
        """Return the object of an answer.

        Raises:
            RefusedError: it is none.
        """
        try:
            found = parse_json(raw) if len(raw) <= MAX_BYTES else None
        except ValueError:  # also wrong UTF-8
            found = None
        if not isinstance(found, dict):
            raise RefusedError(f"{self.address} does not answer as a Draftree server does: check the URL")
        return found


class RoundStream:
    """An open stream of rounds.

    Args:
        client: the client that opened it.
        sock: socket of the connection.
        response: the server's answer.
    """

    def __init__(self, client: ServerClient, sock: socket.socket, response: HTTPResponse) -> None:
        self._client = client
        self._sock = sock
        self._response = response

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield rounds until the server ends the stream.

        Raises:
            UnreachableError: the connection broke.
            RefusedError: an event is not a round.
        """
        data: list[bytes] = []
        while line := self._client.guarded(lambda: self._response.readline(MAX_BYTES + 1)):
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").strip())
            elif not line.strip() and data:
                yield self._client.parsed(b"\n".join(data))
                data = []

    def interrupt(self) -> None:
        """End the stream from another thread; the iteration then ends or raises."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
