"""The state of a running server: accepting, draining, closed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from draftree.serve.errors import closed_error
from draftree.serve.pool import ModelPool, Viewer
from draftree.serve.settings import ServerSettings

logger = logging.getLogger(__name__)


class Server:
    """Admits requests, counts them, and ends them in order.

    Args:
        settings: of the server.
        pool: the served models.
    """

    def __init__(self, settings: ServerSettings, pool: ModelPool) -> None:
        self.settings, self.pool = settings, pool
        self.started = time.time()
        self._is_draining = False
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return not self._is_draining

    @property
    def num_active(self) -> int:
        """Number of requests that generate or wait."""
        return self._num_active

    async def start(self) -> None:
        """Begin to accept requests."""
        self.started = time.time()

    def key_of(self, request: Request) -> Viewer | None:
        """Return the API key of a request; None if the server has no keys."""
        return None

    @asynccontextmanager
    async def admit(self, request: Request) -> AsyncIterator[None]:
        """Count a request while it lasts.

        Raises:
            ApiError: 503 while draining.
        """
        if self._is_draining:
            raise closed_error()
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle.set()

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests, and wait for the running ones.

        Args:
            timeout: maximum seconds.

        Returns:
            Whether all finished in time.
        """
        self._is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            logger.warning("%d requests did not finish within %g s and are ended", self._num_active, timeout)
            return False
        return True

    async def close(self) -> None:
        """End all requests, and free the models."""
        self._is_draining = True
        await self.pool.close()
