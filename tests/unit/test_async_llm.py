"""Many coroutines, one engine: each gets the same texts as alone, and a slow reader delays no other."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from async_samples import PROMPTS, alone, asynchronous, opened, params
from cli_samples import save_tiny_model
from draftree import LLM, AsyncLLM
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.models.table import TableLM, hashed
from engine_samples import VOCAB
from families import target
from spelling import tokenizer


@asynchronous
async def test_many_at_once_write_what_each_writes_alone() -> None:
    async with opened(draft="ngram,min=1", max_batch_size=3) as llm:
        done = await asyncio.gather(*(llm.generate(ids, params(seed)) for seed, ids in enumerate(PROMPTS)))
    assert [texts[0].token_ids for texts in done] == alone()


@asynchronous
async def test_streams_give_every_piece_once_and_in_order() -> None:
    llm = AsyncLLM(target("llama"), "ngram,min=1", tokenizer=tokenizer())

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


@asynchronous
async def test_a_slow_reader_delays_no_other_request() -> None:
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
async def test_a_refused_request_affects_no_other() -> None:
    async with opened() as llm:
        asked = [
            llm.generate([], params(1)),
            llm.generate([VOCAB], params(1)),
            llm.generate("text", params(1)),
            llm.generate([1], params(1, 10**6)),
            llm.generate([1], {"max_tokens": 3}),  # type: ignore[arg-type]
            llm.generate(PROMPTS[0], params(0)),
        ]
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, InvalidRequestError) for one in done[:5])
        assert done[5][0].token_ids == alone()[0]  # type: ignore[index]
        with pytest.raises(InvalidRequestError, match="n=2"):
            await anext(llm.stream([1], params(1, n=2)))


@asynchronous
async def test_cached_state_can_be_dropped() -> None:
    async with opened() as llm:
        await llm.generate([1 + i % 9 for i in range(40)], params(1))
        assert llm.prefix_stats.kept == 1
        await llm.forget()
        assert llm.prefix_stats.kept == 0


@pytest.mark.parametrize("count", [-1, "many", 1.5, None])
def test_max_waiting_is_a_whole_number(count: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_waiting is"):
        AsyncLLM(TableLM(hashed(VOCAB, seed=5), order=3), max_waiting=count)
    assert not [thread for thread in threading.enumerate() if thread.name == "draftree-engine"]


@asynchronous
async def test_a_chat_is_answered_as_by_the_synchronous_front() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = save_tiny_model(Path(place), chat=True)
        talks = [[{"role": "user", "content": text}] for text in ("ab", "a longer question", "b")]
        wanted = LLM(folder).chat(talks, params(3))
        async with AsyncLLM(folder, "ngram") as llm:
            done = await asyncio.gather(*(llm.chat(talk, params(3)) for talk in talks))
            assert [texts[0].token_ids for texts in done] == [text.token_ids for text in wanted]
            assert len(await llm.chat(talks[0], params(3, n=2), priority=-1)) == 2
            with pytest.raises(InvalidRequestError, match="A chat must be a list of messages, but got str"):
                await llm.chat("ab")  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError, match="one conversation per call"):
                await llm.chat(talks)  # type: ignore[arg-type]
    async with opened() as llm:
        with pytest.raises(InvalidRequestError, match="a conversation needs a tokenizer"):
            await llm.chat(talks[0])
