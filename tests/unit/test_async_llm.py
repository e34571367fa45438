"""Many coroutines, one engine: texts as if alone, back-pressure, cancellation, failures that reach who waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from draftree import AsyncLLM, SamplingParams
from draftree.core.errors import (
    ConfigurationError,
    EngineClosedError,
    GenerationError,
    InvalidRequestError,
    NonFiniteLogitsError,
    QueueFullError,
)
from draftree.core.types import RoundRecord
from draftree.models.table import TableLM, hashed
from engine_samples import VOCAB, table_llm
from spelling import tokenizer

PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [1, 2, 3, 4], [2], [6, 6]]


def params(seed: int, count: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, **more)


def alone(count: int = 12) -> list[tuple[int, ...]]:
    llm = table_llm()
    return [llm.generate(ids, params(seed, count))[0].token_ids for seed, ids in enumerate(PROMPTS)]


@asynccontextmanager
async def opened(model: TableLM | None = None, draft: str | None = None, **options: Any) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM that leaves nothing behind: no thread, no slot, no error in the books."""
    async with AsyncLLM(model or TableLM(hashed(VOCAB, seed=5), order=3), draft, **options) as llm:
        yield llm
    engine = llm.llm.engine
    assert engine.is_idle
    engine.check_integrity()
    llm.llm.forget()
    assert llm.llm.model.num_open == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "draftree-engine"]


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def call() -> None:
        asyncio.run(asyncio.wait_for(test(), timeout=300))

    call.__name__ = test.__name__
    return call


async def asked(llm: AsyncLLM, count: int) -> None:
    """Wait until so many calls wait for the engine's thread."""
    while llm._driver._actions.qsize() < count:
        await asyncio.sleep(0.001)


class Gate:
    """Holds an engine in its first round until it is opened: what is asked meanwhile finds it at work everywhere."""

    def __init__(self) -> None:
        self._is_reached, self._is_open = threading.Event(), threading.Event()

    def __call__(self, record: RoundRecord) -> None:
        self._is_reached.set()
        self._is_open.wait()

    async def reached(self) -> None:
        while not self._is_reached.is_set():
            await asyncio.sleep(0.001)

    async def open_behind(self, llm: AsyncLLM, count: int) -> None:
        """Open once so many have asked for something since it was reached."""
        await asked(llm, count)
        self._is_open.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_open.set()


@asynchronous
async def test_many_at_once_write_what_each_writes_alone() -> None:
    async with opened(draft="ngram,min=1", max_batch_size=3) as llm:
        done = await asyncio.gather(*(llm.generate(ids, params(seed)) for seed, ids in enumerate(PROMPTS)))
    assert [texts[0].token_ids for texts in done] == alone()


@asynchronous
async def test_n_texts_of_one_request() -> None:
    async with opened() as llm:
        done = await llm.generate([1, 2], params(1, n=3))
    assert [d.token_ids for d in done] == [d.token_ids for d in table_llm().generate([1, 2], params(1, n=3))]


@asynchronous
async def test_streams_give_every_piece_once_and_in_order() -> None:
    llm = AsyncLLM(_spelled(), "ngram,min=1", tokenizer=tokenizer())

    async def read(seed: int, delay: float) -> str:
        text = ""
        async for piece in llm.stream([5, 6, seed + 3], params(seed, 20)):
            text += piece
            await asyncio.sleep(delay)
        return text

    async with llm:
        texts = await asyncio.gather(*(read(seed, 0.01 * (seed % 3)) for seed in range(6)))
        wanted = [(await llm.generate([5, 6, seed + 3], params(seed, 20)))[0].text for seed in range(6)]
    assert texts == wanted
    assert all(texts)


def _spelled() -> Any:
    from families import target

    return target("llama")


@asynchronous
async def test_a_slow_reader_holds_up_nobody() -> None:
    async with opened() as llm:
        slow = llm.stream_updates([1, 2], params(1, 50))
        first = asyncio.ensure_future(anext(slow, None))
        done = await asyncio.gather(*(llm.generate(ids, params(seed)) for seed, ids in enumerate(PROMPTS)))
        assert [texts[0].token_ids for texts in done] == alone()
        last = await first
        async for update in slow:
            last = update
        assert last is not None
        assert last.is_last
        assert last.sequence.history.num_output_tokens == 50


@asynchronous
async def test_a_full_queue_refuses_or_lets_wait() -> None:
    waiting: list[int] = []

    def listen(record: RoundRecord) -> None:
        gate(record)
        waiting.append(llm.num_waiting)

    with Gate() as gate:
        async with opened(max_batch_size=1, max_waiting=2, on_round=listen) as llm:
            tasks = [asyncio.ensure_future(llm.generate([1], params(0, 20)))]
            await gate.reached()
            tasks += [asyncio.ensure_future(llm.generate([1], params(seed, 20))) for seed in range(1, 6)]
            await asked(llm, 5)
            refused = asyncio.ensure_future(llm.generate([2], params(9), wait=False))
            await gate.open_behind(llm, 6)
            with pytest.raises(QueueFullError):
                await refused
            done = await asyncio.gather(*tasks)
    assert all(len(texts[0].token_ids) == 20 for texts in done)
    assert max(waiting) == 2


@asynchronous
async def test_priorities_pass_by() -> None:
    finished: list[int] = []

    async def ask(llm: AsyncLLM, number: int, priority: int) -> None:
        await llm.generate([1], params(number, 20), priority=priority)
        finished.append(number)

    with Gate() as gate:
        async with opened(max_batch_size=1, on_round=gate) as llm:
            tasks = [asyncio.ensure_future(ask(llm, 0, 0))]
            await gate.reached()
            tasks += [
                asyncio.ensure_future(ask(llm, number, priority)) for number, priority in ((1, 5), (2, 0), (3, -5))
            ]
            await gate.open_behind(llm, 3)
            await asyncio.gather(*tasks)
    assert finished == [0, 3, 2, 1]


@asynchronous
async def test_priorities_pass_by_where_the_queue_is_full_as_well() -> None:
    rounds: list[RoundRecord] = []
    async with opened(max_batch_size=1, max_waiting=1, on_round=rounds.append) as llm:
        driver, gate, tasks = llm._driver, threading.Event(), []
        driver.call(gate.wait)  # so that all have asked before the first is served
        while not driver._actions.empty():
            await asyncio.sleep(0.001)
        for number, priority in enumerate((0, 5, 5, 5, 0, -5)):
            tasks.append(asyncio.ensure_future(llm.generate([1], params(number, 4), priority=priority)))
            await asked(llm, number + 1)
        gate.set()
        await asyncio.gather(*tasks)
    served = dict.fromkeys(record.sequences[0].request_id for record in rounds)
    assert list(served) == [f"request-{number + 1}" for number in (0, 5, 4, 1, 2, 3)]


@asynchronous
async def test_cancelling_a_task_aborts_its_request() -> None:
    with Gate() as gate:
        async with opened(on_round=gate) as llm:
            task = asyncio.ensure_future(llm.generate([1], params(1, 4000)))
            await gate.reached()
            other = asyncio.ensure_future(llm.generate(PROMPTS[0], params(0)))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gate.open_behind(llm, 2)
            assert (await other)[0].token_ids == alone()[0]
            while llm.num_running:
                await asyncio.sleep(0.001)


@asynchronous
async def test_a_stream_that_is_left_frees_its_slot() -> None:
    with Gate() as gate:
        async with opened(on_round=gate) as llm:
            updates = llm.stream_updates([1], params(1, 4000))
            task = asyncio.ensure_future(anext(updates))
            await gate.reached()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await updates.aclose()
            await gate.open_behind(llm, 1)
            while llm.num_running:
                await asyncio.sleep(0.001)


@asynchronous
async def test_what_is_refused_is_refused_alone() -> None:
    async with opened() as llm:
        asked = [
            llm.generate([], params(1)),
            llm.generate([VOCAB], params(1)),
            llm.generate("text", params(1)),
            llm.generate([1], params(1, 10**6)),
            llm.generate(PROMPTS[0], params(0)),
        ]
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, InvalidRequestError) for one in done[:4])
        assert done[4][0].token_ids == alone()[0]  # type: ignore[index]
        with pytest.raises(InvalidRequestError, match="n=2"):
            await anext(llm.stream([1], params(1, n=2)))


@asynchronous
async def test_nan_fails_its_own_request() -> None:
    base = hashed(VOCAB, seed=5)

    def table(context: tuple[int, ...]) -> Any:
        return base(context[-3:]) * (float("nan") if context[:1] == (9,) and len(context) > 4 else 1.0)

    async with opened(TableLM(table)) as llm:
        sick, healthy = await asyncio.gather(
            llm.generate([9, 1], params(1)), llm.generate(PROMPTS[0], params(0)), return_exceptions=True
        )
    assert isinstance(sick, NonFiniteLogitsError)
    assert healthy[0].token_ids == alone()[0]  # type: ignore[index]


@asynchronous
async def test_a_step_that_raises_reaches_everybody_and_the_engine_goes_on() -> None:
    fuse = [3]

    def listen(record: object) -> None:
        fuse[0] -= 1
        if fuse[0] == 0:
            raise RuntimeError("the listener broke")

    async with opened(on_round=listen) as llm:
        asked = (llm.generate(ids, params(seed, 500)) for seed, ids in enumerate(PROMPTS[:3]))
        done = await asyncio.gather(*asked, return_exceptions=True)
        failed = [one for one in done if isinstance(one, GenerationError)]
        assert failed
        assert "the listener broke" in str(failed[0])
        assert (await llm.generate(PROMPTS[0], params(0)))[0].token_ids == alone()[0]


@asynchronous
async def test_an_engine_that_breaks_down_tells_everybody() -> None:
    def listen(record: object) -> None:
        raise KeyboardInterrupt

    llm = AsyncLLM(TableLM(hashed(VOCAB, seed=5)), on_round=listen)
    done = await asyncio.gather(*(llm.generate([1], params(seed)) for seed in range(3)), return_exceptions=True)
    assert all(isinstance(one, Exception) for one in done)
    with pytest.raises(EngineClosedError):
        await llm.generate([1], params(1))
    await llm.close()
    assert llm.llm.model.num_open == 0


@asynchronous
async def test_closing_ends_everything_and_says_so() -> None:
    with Gate() as gate:
        async with opened(max_batch_size=1, max_waiting=1, on_round=gate) as llm:
            tasks = [asyncio.ensure_future(llm.generate([1], params(0, 4000)))]
            await gate.reached()
            tasks += [asyncio.ensure_future(llm.generate([1], params(seed, 4000))) for seed in range(1, 4)]
            await asked(llm, 3)
            closing = asyncio.ensure_future(llm.close())
            await gate.open_behind(llm, 4)
            await closing
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, EngineClosedError) for one in done)
            with pytest.raises(EngineClosedError):
                await llm.generate([1], params(1))
            await llm.close()


@asynchronous
async def test_draining_finishes_what_was_taken() -> None:
    with Gate() as gate:
        async with opened(max_batch_size=2, on_round=gate) as llm:
            tasks = [asyncio.ensure_future(llm.generate(PROMPTS[0], params(0)))]
            await gate.reached()
            tasks += [asyncio.ensure_future(llm.generate(PROMPTS[n], params(n))) for n in range(1, len(PROMPTS))]
            await asked(llm, len(PROMPTS) - 1)
            draining = asyncio.ensure_future(llm.drain())
            await gate.open_behind(llm, len(PROMPTS))
            await draining
            done = await asyncio.gather(*tasks)
            assert [texts[0].token_ids for texts in done] == alone()
            with pytest.raises(EngineClosedError):
                await llm.generate([1], params(1))


@asynchronous
async def test_what_is_remembered_can_be_forgotten() -> None:
    async with opened() as llm:
        await llm.generate([1 + i % 9 for i in range(40)], params(1))
        assert llm.prefix_stats.kept == 1
        await llm.forget()
        assert llm.prefix_stats.kept == 0


@pytest.mark.parametrize("count", [-1, "many", 1.5, None])
def test_how_many_may_wait_is_a_whole_number(count: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_waiting is"):
        AsyncLLM(TableLM(hashed(VOCAB, seed=5), order=3), max_waiting=count)
    assert not [thread for thread in threading.enumerate() if thread.name == "draftree-engine"]


@asynchronous
async def test_parameters_of_another_kind_are_refused() -> None:
    async with opened() as llm:
        with pytest.raises(InvalidRequestError, match="give SamplingParams"):
            await llm.generate([1, 2], {"max_tokens": 3})  # type: ignore[arg-type]
