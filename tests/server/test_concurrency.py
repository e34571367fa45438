"""Many clients at once, clients that leave, and the end of a server."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from draftree import SamplingParams
from operated import num_calls, paused, wait_for
from serving import HTTP, NAME, Running, plain_llm, running_server, send

PROMPTS = ["The quick brown fox", "def add(first", "日本語", "Smile", "the dog sleeps", "print(", "a flag", "over"]


def test_eight_concurrent_streams_equal_the_library(server: Running) -> None:
    chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    fields = [{"max_tokens": 24 + n, "seed": n, "temperature": 0.8, "top_p": 0.95} for n in range(len(chats))]
    expected = [
        plain_llm().chat(chat, SamplingParams(**given))[0].text for chat, given in zip(chats, fields, strict=True)
    ]

    async def ask(client: openai.AsyncOpenAI, chat: Any, given: dict[str, Any]) -> str:
        stream = await client.chat.completions.create(model=NAME, messages=chat, stream=True, **given)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everything() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, *each) for each in zip(chats, fields, strict=True)))

    for _ in range(2):
        assert asyncio.run(everything()) == expected
    assert server.llm.num_running == 0


def in_thread(server: Running, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(HTTP.post(f"{server.url}/v1/completions", json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def close(server: Running, goes_on: threading.Event) -> None:
    """Close a server whose engine is paused: the engine's thread ends after the round in which it waits."""
    closing = asyncio.run_coroutine_threadsafe(server.server.close(), server.loop)
    wait_for(lambda: num_calls(server) or closing.done())
    goes_on.set()
    closing.result()


@pytest.mark.parametrize("waits", [True, False])
def test_draining_refuses_new_requests_and_lets_others_finish(waits: bool) -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 1}
    with running_server() as running, paused(running) as goes_on:
        thread, answers = in_thread(running, body)
        wait_for(lambda: running.llm.num_running)
        running.loop.call_soon_threadsafe(running.server.begin_drain)
        wait_for(lambda: not running.server.is_ready)
        refused = HTTP.post(f"{running.url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
        assert HTTP.get(f"{running.url}/v1/models").status_code == 200
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
        HTTP.stream("POST", f"{running.url}/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith('data: {"id"')
        close(running, goes_on)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"error"' in rest[-2]
    assert '"shutting_down"' in rest[-2]


CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"model": NAME, "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "num_requests", "num_texts"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hello"}]}, 1, 1),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}], "n": 3}, 1, 3),
        (PLAIN, {"prompt": ["one", "two"], "n": 2}, 2, 4),
    ],
)
def test_its_texts_are_aborted(
    server: Running, path: str, fields: dict[str, Any], num_requests: int, num_texts: int, stream: bool
) -> None:
    rounds: list[int] = []
    with paused(server, texts=num_texts):
        remove = server.llm.on_round(lambda record: rounds.append(len(record.sequences)))
        connection = send(server, path, {**LONG, **fields, "stream": stream})
        wait_for(lambda: server.llm.num_running == num_texts)
        connection.close()
        wait_for(lambda: num_calls(server) == num_requests)
    wait_for(lambda: server.llm.num_running + server.llm.num_waiting + server.server.num_active == 0)
    remove()
    assert rounds.count(num_texts) == 1, "the round in which the client left was the last"


def test_it_disturbs_no_other_request(server: Running) -> None:
    body = {"model": NAME, "prompt": "The quick brown fox", "max_tokens": 20, "seed": 4}
    texts: list[str] = []

    def ask() -> None:
        answer = HTTP.post(f"{server.url}{PLAIN}", json=body)
        texts.append(answer.json()["choices"][0]["text"])

    ask()
    staying = threading.Thread(target=ask)
    with paused(server, texts=4):
        staying.start()
        leaving = [send(server, PLAIN, {**LONG, "prompt": "one", "stream": True}) for _ in range(3)]
        wait_for(lambda: server.llm.num_running == 4)
        for connection in leaving:
            connection.close()
        wait_for(lambda: num_calls(server) == 3)
    staying.join()
    assert texts == [texts[0]] * 2
    wait_for(lambda: server.server.num_active == 0)


def test_half_a_request_starts_nothing(server: Running) -> None:
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
        for _ in range(2):  # the server has read the half before the second answer
            assert HTTP.get(f"{server.url}/health").status_code == 200
    assert (server.llm.num_running, server.llm.num_waiting, server.server.num_active) == (0, 0, 0)
