"""The feed of rounds: several readers, slow readers, many threads, the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from draftree.core.types import RoundRecord, SequenceRecord
from draftree.serve.errors import ApiError
from draftree.serve.rounds import FeedRound, RoundFeed
from event_loop import in_loop


def record(written: int = 3) -> RoundRecord:
    row = SequenceRecord("req-1", 10, 4, 4, written - 1, written, written - 1, index=1)
    return RoundRecord(0.1, 0.2, 0.3, 0.4, 0.5, 1.5, 5, (row,))


async def started(feed: RoundFeed, reader: Any) -> asyncio.Task[list[FeedRound]]:
    before = feed.num_readers
    assert await anext(reader) == []
    assert feed.num_readers == before + 1
    return asyncio.ensure_future(anext(reader))


def test_a_round_has_counts_and_seconds_but_no_text() -> None:
    assert FeedRound(7, "smollm2", 1e9, record()).as_json() == {
        "number": 7,
        "model": "smollm2",
        "time": 1e9,
        "seconds": {"plan": 0.1, "draft": 0.2, "score": 0.3, "verify": 0.4, "commit": 0.5, "total": 1.5},
        "rows": 5,
        "sequences": [
            {"request_id": "req-1", "index": 1, "num_drafted": 4, "num_accepted": 2, "num_written": 3, "depth": 4}
        ],
    }


@in_loop
async def test_every_reader_gets_every_round() -> None:
    feed = RoundFeed()
    push = feed.listener("m")
    readers = [feed.read(), feed.read()]
    tasks = [await started(feed, reader) for reader in readers]
    for _ in range(3):
        push(record())
    for task in tasks:
        assert [one.number for one in await task] == [1, 2, 3]
    push(record())
    for reader in readers:
        assert [one.number for one in await anext(reader)] == [4]
        await reader.aclose()
    assert feed.num_readers == 0


@in_loop
async def test_rounds_before_a_reader_are_not_kept() -> None:
    feed = RoundFeed()
    feed.listener("m")(record())
    task = await started(feed, feed.read())
    feed.listener("n")(record())
    assert [one.model for one in await task] == ["n"]


@in_loop
async def test_a_slow_reader_misses_old_rounds_and_delays_nothing() -> None:
    feed = RoundFeed(size=4)
    task = await started(feed, feed.read())
    push = feed.listener("m")
    for _ in range(10_000):  # the reader gets no turn before the end
        push(record())
    assert len(feed._kept) == 4
    assert [one.number for one in await task] == [9997, 9998, 9999, 10_000]


@in_loop
async def test_engines_on_several_threads_push_at_the_same_time() -> None:
    feed = RoundFeed(size=10_000)
    reader = feed.read()
    task = await started(feed, reader)
    push = [feed.listener(name) for name in "abc"]
    threads = [threading.Thread(target=lambda p=p: [p(record()) for _ in range(1000)]) for p in push]
    for thread in threads:
        thread.start()
    numbers = [one.number for one in await task]
    while len(numbers) < 3000:
        numbers += [one.number for one in await anext(reader)]
    for thread in threads:
        thread.join()
    assert numbers == list(range(1, 3001))


@in_loop
async def test_readers_end_when_the_feed_is_closed() -> None:
    feed = RoundFeed()
    waiting = await started(feed, feed.read())
    feed.close()
    with pytest.raises(StopAsyncIteration):
        await waiting


def test_a_reader_whose_loop_is_closed_does_not_stop_the_engine() -> None:
    feed = RoundFeed()
    loop = asyncio.new_event_loop()
    loop.close()
    feed._readers[asyncio.Event()] = loop
    feed.listener("m")(record())
    assert [one.number for one in feed._kept] == [1]


@in_loop
async def test_a_reader_beyond_the_limit_is_refused_until_another_one_leaves() -> None:
    feed = RoundFeed(max_readers=2)
    readers = [feed.read() for _ in range(3)]
    for reader in readers[:2]:
        await anext(reader)
    with pytest.raises(ApiError, match="2 clients read the rounds") as refused:
        await anext(readers[2])
    assert (refused.value.status, refused.value.code) == (429, "too_many_readers")
    assert int(refused.value.headers["Retry-After"]) > 0
    await readers[0].aclose()
    another = feed.read()
    await anext(another)
    assert feed.num_readers == 2
    for reader in (readers[1], another):
        await reader.aclose()
    assert feed.num_readers == 0
