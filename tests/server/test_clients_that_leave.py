"""A client that closes its connection frees its place in the batch at once."""

from __future__ import annotations

import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from operated import num_calls, paused, wait_for
from serving import NAME, Running, send

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
        answer = httpx.post(f"{server.url}{PLAIN}", json=body, timeout=60)
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
    staying.join(60)
    assert texts == [texts[0]] * 2
    wait_for(lambda: server.server.num_active == 0)


def test_half_a_request_starts_nothing(server: Running) -> None:
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
        for _ in range(2):  # the server has read the half before the second answer
            assert httpx.get(f"{server.url}/health").status_code == 200
    assert (server.llm.num_running, server.llm.num_waiting, server.server.num_active) == (0, 0, 0)
