"""Requests that wait for room in the queue: served by priority, until there is room, or until they are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from async_samples import Gate, asked, asynchronous, held, opened, params
from draftree import AsyncLLM
from draftree.core.errors import EngineClosedError, InvalidRequestError, QueueFullError
from draftree.core.types import RoundRecord


async def in_line(llm: AsyncLLM) -> int:
    """The number of requests that wait for room, with an integrity check."""

    def count() -> int:
        llm._driver.check_integrity()
        llm.llm.engine.check_integrity()
        return len(llm._driver._line)

    return await asyncio.wrap_future(llm._driver.call(count))


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
async def test_priorities_pass_by_where_the_queue_is_full_as_well() -> None:
    rounds: list[RoundRecord] = []
    async with opened(max_batch_size=1, max_waiting=1, on_round=rounds.append) as llm:
        tasks = []
        async with held(llm):
            for number, priority in enumerate((0, 5, 5, 5, 0, -5)):
                tasks.append(asyncio.ensure_future(llm.generate([1], params(number, 4), priority=priority)))
                await asked(llm, number + 1)
        await asyncio.gather(*tasks)
    served = dict.fromkeys(record.sequences[0].request_id for record in rounds)
    assert list(served) == [f"request-{number + 1}" for number in (0, 5, 4, 1, 2, 3)]


@asynchronous
async def test_a_cancelled_request_leaves_the_line_immediately() -> None:
    with Gate() as gate:
        async with opened(max_batch_size=1, max_waiting=0, on_round=gate) as llm:
            async with held(llm):
                tasks = [asyncio.ensure_future(llm.generate([1], params(0, 4000)))]
                await asked(llm, 1)
                tasks += [asyncio.ensure_future(llm.generate([1], params(seed, 4))) for seed in range(1, 4)]
                await asked(llm, 4)
            await gate.reached()
            counts = [asyncio.ensure_future(in_line(llm))]
            await asked(llm, 1)
            tasks[2].cancel()
            await asyncio.gather(tasks[2], return_exceptions=True)
            counts.append(asyncio.ensure_future(in_line(llm)))
            await asked(llm, 3)
            tasks[0].cancel()
            await gate.open_behind(llm, 4)  # all four are processed before the next round
            assert await asyncio.gather(*counts) == [2, 1]
            done = await asyncio.gather(tasks[1], tasks[3])
            assert await in_line(llm) == 0
    assert all(len(texts[0].token_ids) == 4 for texts in done)


@asynchronous
async def test_a_request_cancelled_before_its_turn_is_not_served() -> None:
    rounds: list[RoundRecord] = []
    async with opened(on_round=rounds.append) as llm, held(llm):
        task = asyncio.ensure_future(llm.generate([1], params(1)))
        await asked(llm, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert not rounds


@asynchronous
async def test_a_request_of_several_texts_is_refused_as_one() -> None:
    with Gate() as gate:
        async with opened(max_batch_size=1, max_waiting=2, on_round=gate) as llm:
            tasks = [asyncio.ensure_future(llm.generate([1], params(0, 4)))]
            await gate.reached()
            tasks.append(asyncio.ensure_future(llm.generate([1], params(1, 4))))
            await asked(llm, 1)
            full = asyncio.ensure_future(llm.generate([2], params(9, n=3), wait=False))
            endless = asyncio.ensure_future(llm.generate([2], params(9, 10**6, n=3), wait=False))
            await gate.open_behind(llm, 2)
            with pytest.raises(QueueFullError, match="3 sequences cannot be queued"):
                await full
            with pytest.raises(InvalidRequestError):
                await endless
            done = await asyncio.gather(*tasks)
    assert all(len(texts[0].token_ids) == 4 for texts in done)


@asynchronous
async def test_draining_serves_requests_in_line_and_no_others() -> None:
    async with opened(max_batch_size=1, max_waiting=0) as llm:
        async with held(llm):
            tasks = [asyncio.ensure_future(llm.generate([1], params(seed, 4))) for seed in range(3)]
            await asked(llm, 3)
            draining = asyncio.ensure_future(llm.drain())
            await asked(llm, 4)
            late = asyncio.ensure_future(llm.generate([1], params(3, 4)))
            await asked(llm, 5)
        await draining
        assert not llm.num_running
        done = await asyncio.gather(*tasks)
        with pytest.raises(EngineClosedError):
            await late
    assert all(len(texts[0].token_ids) == 4 for texts in done)
