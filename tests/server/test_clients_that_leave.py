"""A client that closes its connection frees its place in the batch at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from serving import NAME, Running, running_server, send, slow_rounds

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"model": NAME, "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running, slow_rounds(running.llm, seconds=0.01):
        yield running


def wait_until(server: Running, *, running: int, seconds: float = 10) -> float:
    """Wait until so many sequences run; returns the seconds."""
    start = time.monotonic()
    while server.llm.num_running + server.llm.num_waiting != running:
        assert time.monotonic() - start < seconds, (server.llm.num_running, server.llm.num_waiting)
        time.sleep(0.002)
    return time.monotonic() - start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hello"}]}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}], "n": 3}, 3),
        (PLAIN, {"prompt": ["one", "two"], "n": 2}, 4),
    ],
)
def test_its_texts_are_aborted(server: Running, path: str, fields: dict[str, Any], count: int, stream: bool) -> None:
    connection = send(server, path, {**LONG, **fields, "stream": stream})
    wait_until(server, running=count)
    connection.close()
    assert wait_until(server, running=0) < 1.0
    assert server.server.num_active == 0


def test_it_disturbs_no_other_request(server: Running) -> None:
    body = {"model": NAME, "prompt": "The quick brown fox", "max_tokens": 20, "seed": 4}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        alone = http.post(PLAIN, json=body).json()["choices"][0]["text"]
        leaving = [send(server, PLAIN, {**LONG, "prompt": "one", "stream": True}) for _ in range(3)]
        wait_until(server, running=3)
        for connection in leaving:
            connection.close()
        assert http.post(PLAIN, json=body).json()["choices"][0]["text"] == alone
    wait_until(server, running=0)


def test_half_a_request_starts_nothing(server: Running) -> None:
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
        time.sleep(0.1)
    wait_until(server, running=0)
    assert server.server.num_active == 0
