"""Clients of the gate that stay until they are released. Not a test itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from draftree.serve.errors import ApiError
from draftree.serve.gate import Gate


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Client:
    """One request that stays at the gate until it is released."""

    def __init__(self, gate: Gate, key: str, *, texts: int = 1, priority: int = 0) -> None:
        self.key, self.texts, self.priority = key, texts, priority
        self.waited: float | None = None
        self.error: ApiError | None = None
        self._done = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(gate))

    async def _run(self, gate: Gate) -> None:
        try:
            async with gate.enter(self.key, texts=self.texts, priority=self.priority) as ticket:
                self.waited = ticket.waited
                await self._done.wait()
        except ApiError as error:
            self.error = error

    @property
    def is_running(self) -> bool:
        return self.waited is not None and not self.task.done()

    @property
    def is_waiting(self) -> bool:
        return self.waited is None and not self.task.done()

    def release(self) -> None:
        self._done.set()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def call() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    call.__name__ = test.__name__
    return call


async def arrival(gate: Gate, key: str, *, texts: int = 1, priority: int = 0) -> Client:
    """A client that has arrived."""
    made = Client(gate, key, texts=texts, priority=priority)
    await settle()
    return made


async def clients(gate: Gate, keys: str) -> list[Client]:
    """One client for each letter, in this order."""
    return [await arrival(gate, key) for key in keys]


async def end(made: list[Client]) -> None:
    for client in made:
        client.release()
    await asyncio.gather(*(client.task for client in made), return_exceptions=True)
