"""SmolLM2 with 1, 4, 16 and 64 concurrent requests: every text equals that of its request alone."""

from __future__ import annotations

import asyncio
import functools

import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.loading.load import LoadedModel
from real_weights import loaded_float32

pytestmark = pytest.mark.weights

NUM_TOKENS = 6
SYSTEM = "You are a helpful assistant who answers in one short sentence and never says more than is asked for. "
ENDS = (
    "What is a tree?",
    "Why is the sky blue?",
    "Count: 1, 2, 3,",
    "Tom and Lily went to the park. Tom and",
    "Hello!",
)


def loaded() -> LoadedModel:
    return loaded_float32("smollm2-135m-instruct")


def asked(count: int) -> list[tuple[str, SamplingParams]]:
    return [
        (
            (SYSTEM if number % 2 else "") + ENDS[number % len(ENDS)],
            SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0 if number % 3 else 0.8, seed=number % 8),
        )
        for number in range(count)
    ]


@functools.cache
def alone(prompt: str, params: SamplingParams) -> tuple[int, ...]:
    return plain().generate(prompt, params)[0].token_ids


@functools.cache
def plain() -> LLM:
    return LLM(loaded(), prefix_cache_size=0, max_batch_size=1)


def same(texts: list[tuple[int, ...]], wanted: list[tuple[int, ...]]) -> bool:
    """Where passes may round otherwise in company, a near-tie may turn out otherwise: then all but one in ten."""
    equal = sum(text == want for text, want in zip(texts, wanted, strict=True))
    return equal == len(wanted) if plain().is_exact else equal >= 0.9 * len(wanted)


@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_at_once(count: int) -> None:
    llm = LLM(loaded(), "suffix", max_batch_size=64)
    requests = asked(count)
    done = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    assert same([d.token_ids for d in done], [alone(*request) for request in requests])
    llm.engine.check_integrity()
    if count >= 16:
        # most that begin with the system prompt found it read
        assert llm.prefix_stats.hits >= count // 4


def test_sixteen_coroutines() -> None:
    async def ask() -> list[tuple[int, ...]]:
        async with AsyncLLM(loaded(), "ngram", max_batch_size=4, max_waiting=2) as llm:
            done = await asyncio.gather(*(llm.generate(prompt, params) for prompt, params in asked(16)))
            return [texts[0].token_ids for texts in done]

    assert same(asyncio.run(ask()), [alone(*request) for request in asked(16)])
