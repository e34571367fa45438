"""Requests to a running server whose queue, limits and state a test examines. Not a test itself."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from draftree.core.types import RoundRecord
from serving import HTTP, NAME, Running


def body(**given: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "ab ab ab", "max_tokens": 8, "temperature": 0} | given


def post(server: Running, headers: dict[str, str] | None = None, **given: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/completions", json=body(**given), headers=headers)


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def wait_for(condition: Callable[[], Any], what: str = "in time") -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def children(process: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


@contextmanager
def paused(running: Running, *, rounds: int = 0, texts: int = 1) -> Iterator[threading.Event]:
    """The engine of the first model waits in a round until the event is set or the block ends.

    Args:
        running: the server.
        rounds: rounds that are not delayed.
        texts: the engine waits in rounds of at least so many texts; in rounds of fewer it waits for the next call.
    """
    goes_on, numbers = threading.Event(), itertools.count()

    def wait(record: RoundRecord) -> None:
        if next(numbers) >= rounds:
            if len(record.sequences) < texts:
                wait_for(lambda: goes_on.is_set() or num_calls(running))
            else:
                goes_on.wait()

    remove = running.llm.on_round(wait)
    try:
        yield goes_on
    finally:
        goes_on.set()
        remove()


@contextmanager
def held(running: Running) -> Iterator[None]:
    """The engine's thread processes no call until the block ends."""
    goes_on = threading.Event()
    holding = running.llm._driver.call(goes_on.wait)
    wait_for(lambda: num_calls(running) == 0)
    try:
        yield
    finally:
        goes_on.set()
    assert holding.result()


def num_calls(running: Running) -> int:
    """Number of calls that wait for the engine's thread."""
    return len(running.llm._driver._mailbox)
