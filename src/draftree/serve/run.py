"""A server as a process: its signals, the loading of models while it listens, and the drain."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import uvicorn

from draftree.core.errors import RankError
from draftree.models.source import FeatureSource
from draftree.sampling.params import SamplingParams
from draftree.serve.access import KeyRing
from draftree.serve.app import create_app
from draftree.serve.listening import ConnectionLimits, FullNotice, TimedProtocol, tls_options, url_of
from draftree.serve.pool import ModelPool, ServedModel, load_models
from draftree.serve.records import configured_logs
from draftree.serve.server import Server
from draftree.serve.settings import ServerSettings
from draftree.serve.verify import MAX_FRAME_BYTES, VerifySettings
from draftree.serve.verify.layer_passes import require_divisible
from draftree.speech.transcriber import Speech

logger = logging.getLogger(__name__)

HANDLED = (signal.SIGINT, signal.SIGTERM)
SIGNALLED = 128  # offset from a signal number to the exit status of a process that the signal ended
WARM_UP_TOKENS = 8
SWITCH_SECONDS = 1e-4
"""Longest time for which the event loop keeps the engine's thread from Python's lock; Python's own is 5 ms."""
POLL_SECONDS = 0.05
LAST_BYTES_SECONDS = 1  # seconds for connections to send the end of their responses after a drain


class DrainingServer(uvicorn.Server):
    """A uvicorn server that finishes running requests after the first signal, and ends at once after the second."""

    def __init__(self, config: uvicorn.Config, server: Server, *, drain_timeout: float) -> None:
        super().__init__(config)
        self.server = server
        self.signal: int | None = None
        self.is_clean = True
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

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.server.lost_process is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.is_clean = False
            self.force_exit = True
        self.signal = sig
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        self.server.begin_drain()
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_timeout
        while self.server.num_active and not self.force_exit and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        if self.server.num_active:
            self.is_clean = False
            logger.warning("%d requests did not finish in time and are ended", self.server.num_active)
        await super().shutdown(sockets)


def run_server(
    settings: ServerSettings,
    keys: KeyRing,
    *,
    listener: socket.socket,
    on_ready: Callable[[str, Sequence[ServedModel]], None],
    verify: VerifySettings | None = None,
) -> int:
    """Serve until a signal arrives, and return the exit status; a failed load, or a signal during it, is raised.

    `on_ready` gets the server's URL and the models when all are loaded.
    """
    tls: dict[str, Any] = tls_options(settings)
    pool = ModelPool()
    app = create_app(settings, pool, keys=keys, verify=verify)
    limits = ConnectionLimits.of_process()
    notice = FullNotice()
    limited = {"head_timeout": settings.body_timeout, "max_connections": limits.most, "notice": notice}
    protocol = type("Protocol", (TimedProtocol,), limited)
    config = uvicorn.Config(
        app,
        http=protocol,
        backlog=limits.at_once,
        ws="none" if verify is None else "websockets-sansio",
        ws_max_size=MAX_FRAME_BYTES,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.keep_alive)),
        timeout_graceful_shutdown=LAST_BYTES_SECONDS,
        **tls,
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    server = DrainingServer(config, app.state.server, drain_timeout=settings.drain_timeout)

    def load() -> list[ServedModel]:
        models = load_models(settings)
        if verify is not None:
            asyncio.run(require_divisible(models, verify.split))
        return models

    loading = Loading(load, server)
    url = url_of(listener, scheme="https" if tls else "http")

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(notice.handle)
        loading.start(lambda: on_ready(url, list(pool)))
        await server.serve(sockets=[listener])

    with configured_logs(as_json=settings.log_format == "json", level=settings.log_level):
        asyncio.run(serve())
    if loading.error is not None:
        raise loading.error
    if server.signal is not None and loading.is_running:
        raise KeyboardInterrupt if server.signal == signal.SIGINT else SystemExit(SIGNALLED + server.signal)
    if (lost := server.server.lost_process) is not None:
        raise lost
    return server.status


class Loading:
    """Models that are loaded on a thread of their own while the server listens."""

    def __init__(self, load: Callable[[], Sequence[ServedModel]], server: DrainingServer) -> None:
        self.error: BaseException | None = None
        self._load = load
        self._server = server
        self._thread: threading.Thread | None = None

    def start(self, on_ready: Callable[[], None]) -> None:
        """Start the thread; `on_ready` is called on the event loop."""
        loop = asyncio.get_running_loop()

        def finish(models: Sequence[ServedModel]) -> None:
            self._server.server.open(models)
            on_ready()

        def work() -> None:
            try:
                models = asyncio.run(warm_up(self._load()))
                exempt_from_collections()
            except BaseException as error:
                self.error = error
                self._server.should_exit = True
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(finish, models)

        # a daemon: a server that is ended while it loads does not wait
        self._thread = threading.Thread(target=work, name="draftree-loading", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


async def warm_up(models: Sequence[ServedModel]) -> list[ServedModel]:
    """Run a short request on every model, because its first passes are slower than all others.

    Models whose request succeeded are returned; the others are logged and closed.
    """
    ready = []
    failure = None
    for model in models:
        try:
            await _short_request(model)
        except Exception as error:  # kernels and checkpoints may raise anything
            if isinstance(model.llm.failure, RankError):
                raise
            logger.error("'%s' is not served, because its warm-up failed: %s", model.name, error)
            failure = error
            await model.llm.close()
        else:
            ready.append(model)
    if failure is not None and not ready:
        raise failure
    return ready


async def _short_request(model: ServedModel) -> None:
    room = model.max_context
    count = max(1, min(WARM_UP_TOKENS, room - 2))
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    prompt: list[int] | FeatureSource = [0] * min(2, room - 1)
    transcriber = model.llm.llm.transcriber
    if transcriber.reads_sound:
        silence = np.zeros(transcriber.sampling_rate, dtype=np.float32)
        prompt, _ = await model.llm.detect_speech(silence, Speech())
    async with await model.llm.submit(prompt, params, owner=None) as submission:
        async for _ in submission:
            pass
    await model.llm.forget(learned=False)


def exempt_from_collections() -> None:
    """Exempt all objects that exist from garbage collection: libraries and models live as long as the server.

    A full collection visits them all and stops every thread meanwhile, with torch for a quarter of a second. The end of
    the process collects them again: some libraries report what is left then.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
