"""Beam searches on the thread of an engine: results, turns with rounds, cancellation, errors, ends."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from async_samples import PROMPTS, alone, asked, asynchronous, held, opened, params
from draftree import BeamSearchParams
from draftree.core.errors import EngineClosedError, InvalidRequestError, NonFiniteLogitsError
from draftree.engine.driver import TimeShare
from draftree.models.table import TableLM, hashed
from engine_samples import VOCAB, table_llm

WIDE = BeamSearchParams(beam_width=4, num_return_sequences=4, max_new_tokens=10)


def beams_alone(given: BeamSearchParams = WIDE) -> list[Any]:
    return table_llm().beam_search(PROMPTS, given)


@asynchronous
async def test_searches_share_their_passes() -> None:
    async with opened() as llm:
        await llm.beam_search(PROMPTS[0], WIDE)
        steps = llm.beam_counts.steps
        async with held(llm):
            searches = [asyncio.create_task(llm.beam_search(PROMPTS[0], WIDE)) for _ in range(5)]
            await asked(llm, len(searches))
        await asyncio.gather(*searches)
        assert llm.beam_counts.steps == 2 * steps


@asynchronous
async def test_texts_beside_searches_are_unchanged() -> None:
    expected, beams = alone(), beams_alone()
    async with opened() as llm:
        jobs = [llm.generate(ids, params(seed)) for seed, ids in enumerate(PROMPTS)]
        done = await asyncio.gather(*jobs, *(llm.beam_search(ids, WIDE) for ids in PROMPTS))
        texts, found = done[: len(PROMPTS)], done[len(PROMPTS) :]
        assert [one[0].token_ids for one in texts] == expected  # type: ignore[index]
        assert list(found) == beams
        assert llm.beam_counts.finished == len(PROMPTS)
        assert (llm.beam_counts.running, llm.beam_counts.waiting) == (0, 0)


@asynchronous
async def test_rounds_go_on_between_the_steps_of_a_search() -> None:
    async with opened() as llm:
        steps: list[int] = []
        llm.on_round(lambda record: steps.append(llm.beam_counts.steps))
        long = BeamSearchParams(beam_width=8, max_new_tokens=200, ignore_eos=True)
        async with held(llm):
            search = asyncio.create_task(llm.beam_search([1], long))
            text = asyncio.create_task(llm.generate([1, 2], params(1, 40, ignore_eos=True)))
            await asked(llm, 2)
        await text
        jumps = [late - early for early, late in itertools.pairwise(steps)]
        assert len(jumps) == 39
        assert max(jumps) == 1, "at most one step of the search between two rounds"
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)


@asynchronous
async def test_a_cancelled_search_frees_its_slots() -> None:
    async with opened() as llm:
        long = BeamSearchParams(beam_width=8, max_new_tokens=100_000 // 8, ignore_eos=True)
        task = asyncio.create_task(llm.beam_search([1, 2], long))
        while not llm.beam_counts.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llm.ping()
        assert llm.llm.model.num_open == 0
        assert llm.beam_counts.running == 0


@asynchronous
async def test_a_failing_search_fails_alone() -> None:
    table = hashed(VOCAB, seed=5)

    def broken(context: tuple[int, ...]) -> Any:
        return table(context) * float("nan") if context[:1] == (6,) else table(context)

    async with opened(TableLM(broken)) as llm:
        found = await asyncio.gather(llm.beam_search([6, 6], WIDE), llm.beam_search([1], WIDE), return_exceptions=True)
        assert isinstance(found[0], NonFiniteLogitsError)
        assert len(found[1].hypotheses) == 4  # type: ignore[union-attr]


@asynchronous
async def test_a_pass_that_raises_ends_the_searches_but_no_texts() -> None:
    class Breaking(TableLM):
        is_broken = False

        def run(self, pass_: Any) -> Any:
            if self.is_broken:
                raise RuntimeError("broken")
            return super().run(pass_)

    model = Breaking(hashed(VOCAB, seed=5), order=3)
    async with opened(model) as llm:
        model.is_broken = True
        with pytest.raises(RuntimeError, match="broken"):
            await llm.beam_search([1], WIDE)
        model.is_broken = False
        assert (await llm.generate(PROMPTS[0], params(0)))[0].token_ids == alone()[0]
        assert len((await llm.beam_search([1], WIDE)).hypotheses) == 4


@asynchronous
async def test_wrong_requests_are_refused() -> None:
    async with opened() as llm:
        with pytest.raises(InvalidRequestError, match="give BeamSearchParams"):
            await llm.beam_search([1], params(1))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="prefix_token_ids"):
            await llm.beam_search([1], BeamSearchParams(prefix_token_ids=[VOCAB]))


@asynchronous
async def test_a_drain_waits_for_searches_and_refuses_new_ones() -> None:
    async with opened() as llm:
        async with held(llm):
            task = asyncio.create_task(llm.beam_search([1], BeamSearchParams(beam_width=6, max_new_tokens=60)))
            await asked(llm, 1)
            draining = asyncio.create_task(llm.drain())
            await asked(llm, 2)
        await draining
        assert len((await task).hypotheses) == 1
        with pytest.raises(EngineClosedError):
            await llm.beam_search([1], WIDE)


@asynchronous
async def test_a_close_ends_searches_with_an_error() -> None:
    async with opened() as llm:
        long = BeamSearchParams(beam_width=8, max_new_tokens=10_000, ignore_eos=True)
        task = asyncio.create_task(llm.beam_search([1, 2], long))
        while not llm.beam_counts.running:
            await asyncio.sleep(0.001)
        await llm.close()
        with pytest.raises(EngineClosedError):
            await task


def test_work_gets_at_most_as_much_time_as_rounds() -> None:
    now = 0.0
    share = TimeShare(lambda: now)

    def spend(seconds: float) -> None:
        nonlocal now
        share.begin()
        now += seconds

    assert share.may_work
    spend(5.0)
    share.end_work(is_alone=False)
    waited = 0
    while not share.may_work:
        spend(1.0)
        share.end_round()
        waited += 1
    assert waited == 5
    for _ in range(10):  # rounds without work save nothing up
        spend(1.0)
        share.end_round()
    spend(1.0)
    share.end_work(is_alone=False)
    assert not share.may_work
    spend(9.0)
    share.end_work(is_alone=True)
    assert share.may_work
