"""A server as a process: its socket, its signals, the loading of models while it listens, and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import stat
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftree.core.errors import ConfigurationError
from draftree.sampling.params import SamplingParams
from draftree.serve.app import create_app
from draftree.serve.loading import load_models
from draftree.serve.logs import configured_logs
from draftree.serve.pool import ModelPool, ServedModel
from draftree.serve.security import KeyRing
from draftree.serve.server import Server
from draftree.serve.settings import ServerSettings

__all__ = ["DrainingServer", "listen", "run_server"]

logger = logging.getLogger(__name__)

HANDLED = (signal.SIGINT, signal.SIGTERM)
SIGNALLED = 128
"""Offset from a signal number to the exit status of a process that the signal ended."""
BACKLOG = 2048
WARM_UP_TOKENS = 8
MAX_HEAD_BYTES = 65536
POLL_SECONDS = 0.05
LAST_BYTES_SECONDS = 1
"""Seconds for connections to send the end of their responses after a drain."""
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


class DrainingServer(uvicorn.Server):
    """A uvicorn server that finishes running requests after the first signal, and ends at once after the second.

    Args:
        config: of uvicorn.
        server: the state that is drained.
        drain_timeout: seconds for running requests.
    """

    def __init__(self, config: uvicorn.Config, server: Server, *, drain_timeout: float) -> None:
        super().__init__(config)
        self.server = server
        self.signal: int | None = None
        self.is_clean = True
        """Whether all requests finished."""
        self._drain_timeout = drain_timeout

    @property
    def status(self) -> int:
        """Exit status: 0 after a clean drain, else that of the signal."""
        return SIGNALLED + self.signal if self.signal is not None and not self.is_clean else 0

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while the server runs; unlike uvicorn, without raising them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at the second signal, end."""
        if self.signal is not None:
            self.is_clean = False
            self.force_exit = True
        self.signal = sig
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait for the running ones, and close all connections."""
        for listener in self.servers:
            listener.close()
        self.server.begin_drain()
        if not await self._is_drained():
            self.is_clean = False
            logger.warning("%d requests did not finish in time and are ended", self.server.num_active)
        await super().shutdown(sockets)

    async def _is_drained(self) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_timeout
        while self.server.num_active:
            if self.force_exit or loop.time() >= end:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True


def run_server(
    settings: ServerSettings, keys: KeyRing, *, listener: socket.socket, on_ready: Callable[[str], None]
) -> int:
    """Serve until a signal arrives.

    Args:
        settings: of the server.
        keys: API keys.
        listener: a bound socket.
        on_ready: called with the server's URL when all models are loaded.

    Returns:
        The exit status.

    Raises:
        DraftreeError: a model cannot be loaded.
    """
    pool = ModelPool()
    app = create_app(settings, pool, keys=keys)
    protocol = type("Protocol", (TimedProtocol,), {"head_timeout": settings.body_timeout})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.keep_alive)),
        timeout_graceful_shutdown=LAST_BYTES_SECONDS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    server = DrainingServer(config, app.state.server, drain_timeout=settings.drain_timeout)
    loading = Loading(lambda: load_models(settings), server)
    with configured_logs(as_json=settings.log_format == "json", level=settings.log_level):
        asyncio.run(_serve(server, listener, loading, lambda: on_ready(url_of(listener))))
    if loading.error is not None:
        raise loading.error
    return server.status


async def _serve(
    server: DrainingServer, listener: socket.socket, loading: Loading, on_ready: Callable[[], None]
) -> None:
    loading.start(on_ready)
    await server.serve(sockets=[listener])


class Loading:
    """Models that are loaded on a thread of their own while the server listens.

    Args:
        load: loads them.
        server: receives them; ends if they cannot be loaded.
    """

    def __init__(self, load: Callable[[], Sequence[ServedModel]], server: DrainingServer) -> None:
        self.error: BaseException | None = None
        self._load = load
        self._server = server

    def start(self, on_ready: Callable[[], None]) -> None:
        """Start the thread; `on_ready` is called on the event loop."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                models = self._load()
                asyncio.run(warm_up(models))
            except BaseException as error:
                self.error = error
                self._server.should_exit = True
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._finish, models, on_ready)

        # a daemon: a server that is ended while it loads does not wait
        threading.Thread(target=work, name="draftree-loading", daemon=True).start()

    def _finish(self, models: Sequence[ServedModel], on_ready: Callable[[], None]) -> None:
        self._server.server.open(models)
        on_ready()


async def warm_up(models: Sequence[ServedModel]) -> None:
    """Generate a few tokens with every model: its first passes are slower than all others."""
    for model in models:
        room = model.max_context
        count = max(1, min(WARM_UP_TOKENS, room - 2))
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        await model.llm.generate([0] * min(2, room - 1), params)
        await model.llm.forget()


def url_of(listener: socket.socket) -> str:
    """Return the URL of a socket."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix:{address}:"
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
