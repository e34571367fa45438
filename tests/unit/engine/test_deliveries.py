"""Updates of a round: one wake-up of each event loop, and none of a closed one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from draftree import SamplingParams
from draftree.engine.driver import RequestHandle
from engine_samples import table_llm


class Loop:
    """Keeps the calls that an event loop would run."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self.calls: list[Callable[[], None]] = []
        self._is_closed = is_closed

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(lambda: callback(*args))


def requests_of(*loops: Loop, n: int = 1) -> list[RequestHandle]:
    make = table_llm().requests.sequences
    params = SamplingParams(max_tokens=3, n=n, seed=1)
    return [RequestHandle(make([1], params), cast("asyncio.AbstractEventLoop", loop)) for loop in loops]


def write(requests: list[RequestHandle], *tokens: int) -> None:
    for request in requests:
        for sequence in request.sequences:
            for token in tokens:
                sequence.write([token], 0)


def test_all_updates_of_a_loop_are_one_call() -> None:
    one, other = Loop(), Loop()
    requests = requests_of(one, one, other, n=2)
    write(requests, 2)
    assert RequestHandle.deliver(requests) == []
    assert [len(one.calls), len(other.calls)] == [1, 1]
    for call in one.calls + other.calls:
        call()
    for request in requests:
        found = [asyncio.run(request.next()) for _ in request.sequences]
        assert [(update.sequence.index, update.token_ids) for update in found if update] == [(0, (2,)), (1, (2,))]


def test_a_loop_without_news_is_not_called() -> None:
    loop = Loop()
    requests = requests_of(loop)
    assert RequestHandle.deliver(requests) == []
    write(requests, 2)
    RequestHandle.deliver(requests)
    RequestHandle.deliver(requests)
    assert len(loop.calls) == 1


def test_the_end_of_a_text_is_sent_once() -> None:
    loop = Loop()
    requests = requests_of(loop)
    write(requests, 2, 3, 4)
    assert requests[0].sequences[0].is_finished
    RequestHandle.deliver(requests)
    RequestHandle.deliver(requests)
    (call,) = loop.calls
    assert not requests[0].is_over
    call()
    assert requests[0].is_over
    assert requests[0].untold == []


def test_requests_of_a_closed_loop_are_returned_and_the_others_get_their_updates() -> None:
    closed, live = Loop(is_closed=True), Loop()
    requests = requests_of(closed, live, closed)
    write(requests, 2)
    assert RequestHandle.deliver(requests) == [requests[0], requests[2]]
    assert len(live.calls) == 1
