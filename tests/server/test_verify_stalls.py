"""Servers that stall while a device connects, sends, waits or leaves: the device notices, with and without TLS."""

from __future__ import annotations

import base64
import hashlib
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftree.remote.address import ConnectionLostError, RemoteAddress
from draftree.remote.transport import PostTransport, Transport, WebSocketTransport
from serving import self_signed

FOR_EVER = 60.0
"""Seconds after which a call counts as one that hangs; the devices of these tests wait for a fraction of one."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    return self_signed(tmp_path_factory.mktemp("tls"))


def upgrade_of(request: bytes) -> bytes:
    key = next(line.split(b": ")[1] for line in request.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )


def stall(peer: socket.socket, stage: str, context: ssl.SSLContext | None) -> socket.socket:
    """Answer up to a stage; returns the socket, which stays open."""
    if stage == "accepted":
        return peer
    if stage == "handshake":
        peer.recv(4096)
        peer.sendall(b"\x16\x03\x03\x40\x00\x02")  # the beginning of a record of the handshake
        return peer
    if context is not None:
        peer = context.wrap_socket(peer, server_side=True)
    if stage == "encrypted":
        return peer
    if stage == "record":
        peer.recv(4096)
        raw = socket.socket(fileno=peer.detach())
        raw.sendall(b"\x17\x03\x03\x01\x00half")  # the beginning of an encrypted record
        return raw
    request = b""
    while b"\r\n\r\n" not in request:
        request += peer.recv(4096)
    if stage == "response":
        peer.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgr")
    elif stage != "request":
        peer.sendall(upgrade_of(request) + (b"\x82\x7e\x01\x00half a frame" if stage == "frame" else b""))
    return peer


@contextmanager
def stalled(stage: str, files: tuple[Path, Path] | None) -> Iterator[str]:
    """Serve one connection up to a stage until the block ends; yields the address."""
    context, is_over = None, threading.Event()
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with stall(listener.accept()[0], stage, context):
                is_over.wait()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        scheme, trusted = ("http", "") if files is None else ("https", f"?ca={files[0]}")
        try:
            yield f"remote:{scheme}://127.0.0.1:{listener.getsockname()[1]}{trusted}"
        finally:
            is_over.set()
            thread.join()


def lost(name: str, kind: type[Transport], frame: bytes) -> list[str]:
    """Connect, send a frame and close on a thread; returns the errors, or fails if the thread hangs."""
    errors: list[str] = []

    def use() -> None:
        try:
            transport: Transport = kind(RemoteAddress.parse(name), None, timeout=0.4, silence=0.2)
        except ConnectionLostError as error:
            errors.append(str(error))
            return
        try:
            transport.exchange(frame)
        except ConnectionLostError as error:
            errors.append(str(error))
        transport.close()

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(FOR_EVER)
    assert not thread.is_alive(), "the device hangs"
    return errors


@pytest.mark.parametrize(
    ("kind", "is_encrypted", "stage"),
    [
        *[(WebSocketTransport, False, stage) for stage in ("accepted", "request", "response", "upgraded", "frame")],
        *[(WebSocketTransport, True, stage) for stage in ("accepted", "handshake", "encrypted", "record", "request")],
        *[(WebSocketTransport, True, stage) for stage in ("response", "upgraded", "frame")],
        *[(PostTransport, False, stage) for stage in ("accepted", "response")],
        *[(PostTransport, True, stage) for stage in ("accepted", "handshake", "encrypted", "record", "response")],
    ],
)
def test_a_server_that_stalls_is_lost(
    files: tuple[Path, Path], kind: type[Transport], is_encrypted: bool, stage: str
) -> None:
    with stalled(stage, files if is_encrypted else None) as name:
        (error,) = lost(name, kind, b"frame")
    assert "no connection" in error or "the connection ended" in error or "no answer" in error


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize(("kind", "stage"), [(WebSocketTransport, "upgraded"), (PostTransport, "request")])
def test_a_server_that_does_not_read_is_lost(
    files: tuple[Path, Path], kind: type[Transport], stage: str, is_encrypted: bool
) -> None:
    with stalled(stage, files if is_encrypted else None) as name:
        (error,) = lost(name, kind, bytes(1 << 25))  # more than the buffers of both ends
    assert "the connection ended" in error or "no answer" in error
