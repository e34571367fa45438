"""What must be the same after many requests: objects, slots, and the sizes of the tables that are kept."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

from async_samples import asynchronous
from draftree import AsyncLLM, SamplingParams
from draftree.drafters.lookup.occurrences import Occurrences
from draftree.models.table import TableLM, hashed

VOCAB = 12
MEMORY = 400
TABLES = {"Bin": 60, "_Cell": 120}
"""Entries of learned tables, which depend on the clock, and how many there can be."""


def census() -> Counter[str]:
    """Objects of the package by type."""
    gc.collect()
    types = (type(one) for one in gc.get_objects())
    return Counter(kind.__name__ for kind in types if str(kind.__module__).startswith("draftree."))


def index_sizes() -> list[tuple[int, int]]:
    """Bytes of every index of earlier text, and the number of its texts."""
    found = [one for one in gc.get_objects() if type(one) is Occurrences]
    return sorted((one.num_bytes, len(one._starts)) for one in found)


async def serve(llm: AsyncLLM, numbers: range) -> None:
    """Serve requests of several kinds, eight at a time; each fourth is abandoned after its first tokens."""

    async def one(number: int) -> None:
        prompt = [number % 5, 3, number % 7, 3, 1] * (1 + number % 6)
        params = SamplingParams(max_tokens=4 + number % 30, temperature=0.7, seed=number % 40, n=1 + number % 2)
        if number % 4:
            await llm.generate(prompt, params)
            return
        stream = llm.stream(prompt, SamplingParams(max_tokens=60, temperature=0.7, seed=number % 40))
        await anext(stream, None)
        await stream.aclose()

    for first in numbers[::8]:
        await asyncio.gather(*(one(number) for number in range(first, first + 8)))
    while llm.num_running or llm.num_waiting:
        await llm.ping()


@asynchronous
async def test_requests_with_drafts_leave_nothing_but_bounded_tables() -> None:
    others, before = Counter(index_sizes()), census()
    async with AsyncLLM(TableLM(hashed(VOCAB, seed=5), order=3), f"suffix,memory={MEMORY}", plan="adaptive") as llm:
        counts = []
        for part in range(3):
            await serve(llm, range(80 * part, 80 * (part + 1)))
            ((num_bytes, num_texts),) = (Counter(index_sizes()) - others).elements()
            assert num_bytes < 64 * MEMORY
            assert num_texts <= MEMORY // 2
            await llm.forget()
            counts.append(census() - before)
            assert llm.llm.model.num_open == 0
    for name, limit in TABLES.items():
        assert max(count.pop(name, 0) for count in counts) <= limit
    assert counts[0]["AdaptivePlanner"]
    assert not counts[0]["WritingSequence"]
    assert counts[1] == counts[2]
