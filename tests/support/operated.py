"""Requests to a running server whose queue, limits and state a test examines. Not a test itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from serving import NAME, Running


def body(**given: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "ab ab ab", "max_tokens": 8, "temperature": 0} | given


def post(server: Running, headers: dict[str, str] | None = None, **given: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body(**given), headers=headers, timeout=60)


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "in time"
        time.sleep(0.01)


@contextmanager
def paused(running: Running) -> Iterator[None]:
    """The engine waits in its first round until the block ends."""
    (model,) = running.pool
    goes_on = threading.Event()
    remove = model.llm.on_round(lambda record: goes_on.wait(60) and None)
    try:
        yield
    finally:
        goes_on.set()
        remove()
