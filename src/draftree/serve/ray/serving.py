"""The server's app in a replica: loaded, started, checked and closed. Needs no ray."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

from draftree.parallel.entry import stop_ranks
from draftree.serve.app import create_app
from draftree.serve.pool import ModelPool, load_models, start_other_ranks
from draftree.serve.ray.routing import App
from draftree.serve.records import configured_logs
from draftree.serve.settings import ServerSettings

RANK_SECONDS = 10.0


def end_ranks(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for processes that were told to stop, and kill those that have not ended."""
    for rank in ranks:
        try:
            rank.wait(RANK_SECONDS)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


class LoadedApp:
    """An ASGI app whose lifespan has started, and its models."""

    def __init__(self, app: App, pool: ModelPool, opened: AsyncExitStack) -> None:
        self.app = app
        self._pool = pool
        self._opened = opened

    @classmethod
    async def load(cls, settings: ServerSettings, *, threads: int | None = None, replica: str = "") -> Self:
        """Load the models and start the app; a divided model gets its other processes as children of this one.

        The ids of stored responses end with the name of the `replica`, so that requests that continue them find it.
        """
        async with AsyncExitStack() as opened:
            opened.enter_context(configured_logs(as_json=settings.log_format == "json", level=settings.log_level))
            ranks = start_other_ranks(settings, threads=threads)
            opened.push_async_callback(asyncio.to_thread, end_ranks, ranks)
            pool = ModelPool(await asyncio.to_thread(load_models, settings))
            for model in pool:
                opened.callback(stop_ranks, model.llm.llm.model)
            app = create_app(settings, pool)
            app.state.server.responses.suffix = f"-{replica}" if replica else ""
            await opened.enter_async_context(app.router.lifespan_context(app))
            return cls(app, pool, opened.pop_all())

    @property
    def num_running(self) -> int:
        return sum(model.llm.num_running for model in self._pool)

    async def check_health(self) -> None:
        """Return when the thread of every engine has responded between two steps."""
        for model in self._pool:
            await model.llm.ping()

    async def close(self) -> None:
        """End all requests and free the models. A second call does nothing."""
        await self._opened.aclose()
