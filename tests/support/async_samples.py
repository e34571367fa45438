"""An AsyncLLM over a table that tests can pause, and tests that are coroutines. Not a test itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from draftree import AsyncLLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.models.table import TableLM, hashed
from engine_samples import VOCAB, table_llm

PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [1, 2, 3, 4], [2], [6, 6]]


def params(seed: int, count: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, **more)


def alone(count: int = 12) -> list[tuple[int, ...]]:
    llm = table_llm()
    return [llm.generate(ids, params(seed, count))[0].token_ids for seed, ids in enumerate(PROMPTS)]


@asynccontextmanager
async def opened(model: TableLM | None = None, draft: str | None = None, **options: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM that must end without a thread, a slot or an integrity error left."""
    before = set(threading.enumerate())
    async with AsyncLLM(model or TableLM(hashed(VOCAB, seed=5), order=3), draft, **options) as llm:
        yield llm
    engine = llm.llm.engine
    assert engine.is_idle
    engine.check_integrity()
    llm.llm.forget()
    assert llm.llm.model.num_open == 0
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "draftree-engine"]


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def call() -> None:
        asyncio.run(asyncio.wait_for(test(), timeout=300))

    call.__name__ = test.__name__
    return call


async def asked(llm: AsyncLLM, count: int) -> None:
    """Wait until so many calls wait for the engine's thread."""
    while len(llm._driver._mailbox) < count:
        await asyncio.sleep(0.001)


@asynccontextmanager
async def held(llm: AsyncLLM) -> AsyncIterator[None]:
    """No call inside the block is processed before its end."""
    gate = threading.Event()
    holding = llm._driver.call(lambda: gate.wait(120))
    while len(llm._driver._mailbox):
        await asyncio.sleep(0.001)
    try:
        yield
    finally:
        gate.set()
    assert await asyncio.wrap_future(holding)


class Gate:
    """Blocks an engine in a round until it is opened: calls in between find it busy.

    Args:
        rounds: number of rounds before that one.
    """

    def __init__(self, rounds: int = 0) -> None:
        self._rounds = rounds
        self._is_reached, self._is_open = threading.Event(), threading.Event()

    def __call__(self, record: RoundRecord) -> None:
        self._rounds -= 1
        if self._rounds >= 0:
            return
        self._is_reached.set()
        self._is_open.wait(120)  # a test that fails ends, too

    async def reached(self) -> None:
        while not self._is_reached.is_set():
            await asyncio.sleep(0.001)

    def open(self) -> None:
        self._is_open.set()

    async def open_behind(self, llm: AsyncLLM, count: int) -> None:
        """Open after this number of calls since it was reached."""
        await asked(llm, count)
        self._is_open.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_open.set()
