"""Queues, cancelled readers, failed requests, failed or closed engines: only the affected requests are notified."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_samples import PROMPTS, Gate, alone, asked, asynchronous, held, opened, params
from draftree import AsyncLLM
from draftree.core.errors import (
    EngineClosedError,
    GenerationError,
    InvalidRequestError,
    NonFiniteLogitsError,
    QueueFullError,
    RankError,
)
from draftree.core.types import RoundRecord
from draftree.engine import driver
from draftree.engine.driver import RequestHandle
from draftree.models.table import TableLM, hashed
from engine_samples import VOCAB


@pytest.mark.parametrize("streams", [False, True])
def test_a_reader_that_leaves_aborts_its_request_alone(streams: bool) -> None:
    async def leave() -> None:
        with Gate() as gate:
            async with opened(on_round=gate) as llm:
                updates = llm.stream_updates([1], params(1, 4000))
                reading = anext(updates) if streams else llm.generate([1], params(1, 4000))
                task = asyncio.ensure_future(reading)  # type: ignore[arg-type]
                await gate.reached()
                other = asyncio.ensure_future(llm.generate(PROMPTS[0], params(0)))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await updates.aclose()
                await gate.open_behind(llm, 2)
                assert (await other)[0].token_ids == alone()[0]
                while llm.num_running:
                    await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(leave(), timeout=300))


@asynchronous
async def test_nan_fails_its_own_request() -> None:
    base = hashed(VOCAB, seed=5)

    def table(context: tuple[int, ...]) -> Any:
        return base(context[-3:]) * (float("nan") if context[:1] == (9,) and len(context) > 4 else 1.0)

    async with opened(TableLM(table)) as llm:
        submission = await llm.submit([9, 1], params(1))
        healthy = asyncio.ensure_future(llm.generate(PROMPTS[0], params(0)))
        updates = [update async for update in submission]
        assert updates[-1].is_last
        assert isinstance(updates[-1].sequence.error, NonFiniteLogitsError)
        with pytest.raises(NonFiniteLogitsError):
            submission.completions()
        with pytest.raises(NonFiniteLogitsError):
            await llm.generate([9, 1], params(1))
        assert (await healthy)[0].token_ids == alone()[0]


@asynchronous
async def test_a_step_that_raises_fails_all_running_requests_and_the_engine_continues() -> None:
    fuse = [3]

    def listen(record: object) -> None:
        fuse[0] -= 1
        if fuse[0] == 0:
            raise RuntimeError("the listener broke")

    async with opened(on_round=listen) as llm:
        requests = (llm.generate(ids, params(seed, 500)) for seed, ids in enumerate(PROMPTS[:3]))
        done = await asyncio.gather(*requests, return_exceptions=True)
        failed = [one for one in done if isinstance(one, GenerationError)]
        assert failed
        assert "the listener broke" in str(failed[0])
        assert (await llm.generate(PROMPTS[0], params(0)))[0].token_ids == alone()[0]


@asynchronous
async def test_an_engine_failure_is_reported_to_all_requests() -> None:
    def listen(record: object) -> None:
        raise KeyboardInterrupt

    llm = AsyncLLM(TableLM(hashed(VOCAB, seed=5)), "none", on_round=listen)
    done = await asyncio.gather(*(llm.generate([1], params(seed)) for seed in range(3)), return_exceptions=True)
    assert all(isinstance(one, Exception) for one in done)
    with pytest.raises(EngineClosedError):
        await llm.generate([1], params(1))
    await llm.close()
    assert llm.llm.model.num_open == 0


@asynchronous
async def test_closing_ends_all_requests_with_an_error() -> None:
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


@pytest.mark.parametrize("is_blocked", [True, False])
def test_a_lost_process_ends_all_requests(is_blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PATIENCE_SECONDS", 0.05 if is_blocked else 60.0)

    async def lose() -> None:
        with Gate() as gate:
            async with opened(max_batch_size=1, on_round=gate) as llm:
                tasks = [asyncio.ensure_future(llm.generate([1], params(0, 4000)))]
                await gate.reached()
                tasks.append(asyncio.ensure_future(llm.generate([1], params(1, 4000))))
                await asked(llm, 1)
                losing = asyncio.ensure_future(asyncio.to_thread(llm._driver.lose, RankError("rank 1 ended")))
                if not is_blocked:
                    await gate.open_behind(llm, 2)
                done = await asyncio.gather(*tasks, return_exceptions=True)
                assert [type(one) for one in done] == [RankError, EngineClosedError]
                assert {str(one) for one in done} == {"rank 1 ended"}
                await losing
                assert (llm.is_alive, str(llm.failure)) == (False, "rank 1 ended")
                with pytest.raises(EngineClosedError, match="rank 1 ended"):
                    await llm.generate([1], params(1))
                with pytest.raises(EngineClosedError, match="rank 1 ended"):
                    await llm.ping()
                await llm.close()
                gate.open()
                llm._driver._thread.join(60)  # `opened` checks that no slot is left

    asyncio.run(asyncio.wait_for(lose(), timeout=300))


def test_a_closed_event_loop_frees_its_slot() -> None:
    llm = AsyncLLM(TableLM(hashed(VOCAB, seed=5), order=3), "none", prefix_cache_size=0)

    async def ask() -> None:
        sequences = llm.llm.requests.sequences([1], params(1, 4000))
        llm._driver.ask(RequestHandle(sequences, asyncio.get_running_loop()), wait=True)
        while not llm.num_running:
            await asyncio.sleep(0.001)

    asyncio.run(ask())
    asyncio.run(asyncio.wait_for(llm.drain(), timeout=60))
    asyncio.run(llm.close())
    assert llm.llm.model.num_open == 0


@asynchronous
async def test_late_requests_are_refused_with_their_own_error() -> None:
    async with opened() as llm:
        await llm.close()
        late = await asyncio.gather(
            *(llm.generate([1], params(1, n=2)) for _ in range(2)), llm.drain(), llm.forget(), return_exceptions=True
        )
    assert all(isinstance(one, EngineClosedError) for one in late)
    assert len({id(one) for one in late}) == 4


@asynchronous
async def test_a_ping_waits_for_the_running_step_and_fails_after_the_end() -> None:
    with Gate() as gate:
        async with opened(on_round=gate) as llm:
            await llm.ping()
            task = asyncio.ensure_future(llm.generate([1], params(1, 50)))
            await gate.reached()
            pinged = asyncio.ensure_future(llm.ping())
            await asked(llm, 1)
            assert not pinged.done()
            gate.open()
            await pinged
            await task
    with pytest.raises(EngineClosedError):
        await llm.ping()


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
