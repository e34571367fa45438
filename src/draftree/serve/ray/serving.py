"""The server's app in a replica: loaded, started, checked and closed. Needs no ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from draftree.serve.app import create_app
from draftree.serve.loading import load_models
from draftree.serve.pool import ModelPool
from draftree.serve.settings import ServerSettings


class LoadedApp:
    """An ASGI app whose lifespan has started, and its models.

    Args:
        app: the FastAPI app.
        pool: its models.
        lifespan: the started lifespan.
    """

    def __init__(self, app: Any, pool: ModelPool, lifespan: AbstractAsyncContextManager[Any]) -> None:
        self.app: Callable[..., Awaitable[None]] = app
        self._pool = pool
        self._lifespan: AbstractAsyncContextManager[Any] | None = lifespan

    @classmethod
    async def load(cls, settings: ServerSettings) -> Self:
        """Load the models and start the app.

        Raises:
            DraftreeError: a model cannot be loaded.
        """
        pool = ModelPool(await asyncio.to_thread(load_models, settings))
        app = create_app(settings, pool)
        lifespan = app.router.lifespan_context(app)
        await lifespan.__aenter__()
        return cls(app, pool, lifespan)

    @property
    def num_running(self) -> int:
        """Number of running sequences of all models."""
        return sum(model.llm.num_running for model in self._pool)

    async def check_health(self) -> None:
        """Return when the thread of every engine has responded between two steps.

        Raises:
            EngineClosedError: an engine has ended.
        """
        for model in self._pool:
            await model.llm.ping()

    async def close(self) -> None:
        """End the lifespan, once."""
        lifespan, self._lifespan = self._lifespan, None
        if lifespan is not None:
            await lifespan.__aexit__(None, None, None)
