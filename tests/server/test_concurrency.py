"""Texts under load equal those of the library for the same seed; draining and closing end requests in order."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import openai
import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.serve.pool import ServedModel
from operated import num_calls, paused, wait_for
from real_weights import loaded_float32
from serving import NAME, Running, running_server, tiny_llm

PROMPTS = [
    "The quick brown fox",
    "def add(first",
    "日本語",
    "Smile",
    "the dog sleeps",
    "print(",
    "a flag",
    "over the lazy dog",
]


def params(seed: int) -> dict[str, Any]:
    return {"max_tokens": 30 + seed, "seed": seed, "temperature": 0.8, "top_p": 0.95}


def test_eight_concurrent_streams_equal_the_library(server: Running) -> None:
    library = tiny_llm(None)
    expected = [
        library.chat([{"role": "user", "content": prompt}], SamplingParams(**params(seed)))[0].text
        for seed, prompt in enumerate(PROMPTS)
    ]

    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": PROMPTS[seed]}], stream=True, **params(seed)
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everything() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(len(PROMPTS))))

    for _ in range(2):
        assert asyncio.run(everything()) == expected
    assert server.llm.num_running == 0


@pytest.mark.weights
def test_concurrent_streams_of_a_real_model_equal_the_library() -> None:
    model = loaded_float32("smollm2-135m-instruct")
    library = LLM(model)
    chats: list[Any] = [[{"role": "user", "content": f"Name {count} colours."}] for count in range(2, 8)]
    expected = [library.chat(chat, SamplingParams(max_tokens=24, seed=seed))[0].text for seed, chat in enumerate(chats)]

    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="real", messages=chats[seed], stream=True, max_tokens=24, seed=seed
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everything(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(len(chats))))

    with running_server([ServedModel("real", AsyncLLM(model, ("suffix", "ngram")))]) as running:
        assert asyncio.run(everything(running.url)) == expected


def in_thread(server: Running, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def close(server: Running, goes_on: threading.Event) -> None:
    """Close a server whose engine is paused: the engine's thread ends after the round in which it waits."""
    closing = asyncio.run_coroutine_threadsafe(server.server.close(), server.loop)
    wait_for(lambda: num_calls(server) or closing.done())
    goes_on.set()
    closing.result(60)


@pytest.mark.parametrize("waits", [True, False])
def test_draining_refuses_new_requests_and_lets_others_finish(waits: bool) -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 1}
    with running_server() as running, paused(running) as goes_on:
        thread, answers = in_thread(running, body)
        wait_for(lambda: running.llm.num_running)
        running.loop.call_soon_threadsafe(running.server.begin_drain)
        wait_for(lambda: not running.server.is_ready)
        refused = httpx.post(f"{running.url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{running.url}/v1/models").status_code == 200
        if waits:
            goes_on.set()
            thread.join()
        close(running, goes_on)
        thread.join()
        assert answers[0].status_code == (200 if waits else 503), answers[0].text
        assert running.server.num_active == 0


def test_an_error_after_the_stream_began_is_its_last_event() -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        running_server(draft=None) as running,
        paused(running, rounds=50) as goes_on,
        httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith('data: {"id"')
        close(running, goes_on)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"error"' in rest[-2]
    assert '"shutting_down"' in rest[-2]
