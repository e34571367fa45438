"""Admission: limits, a bounded queue, Retry-After, cancellation."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from draftree.serve.gate import Gate
from gate_clients import FakeClock, clients, end, in_loop, settle


@in_loop
async def test_no_more_requests_run_than_allowed() -> None:
    gate = Gate(max_running=2, max_waiting=4)
    made = await clients(gate, "aaaa")
    assert [client.is_running for client in made] == [True, True, False, False]
    assert (gate.num_running, gate.num_waiting) == (2, 2)
    made[0].release()
    await settle()
    assert [client.is_running for client in made] == [False, True, True, False]
    await end(made)
    assert (gate.num_running, gate.num_waiting) == (0, 0)


@in_loop
async def test_a_full_queue_refuses_with_503_and_retry_after() -> None:
    gate = Gate(max_running=1, max_waiting=1)
    made = await clients(gate, "aaa")
    error = made[2].error
    assert error is not None
    assert (error.status, error.code, error.headers) == (503, "queue_full", {"Retry-After": "1"})
    await end(made)


@in_loop
async def test_without_a_queue_requests_run_or_are_refused() -> None:
    gate = Gate(max_running=1, max_waiting=0)
    made = await clients(gate, "ab")
    assert made[0].is_running
    assert made[1].error is not None
    assert made[1].error.status == 503
    await end(made)


@in_loop
async def test_waiting_time_and_retry_after_follow_the_clock() -> None:
    clock = FakeClock()
    gate = Gate(max_running=2, max_waiting=10, clock=clock)
    made = await clients(gate, "aaaaaa")
    clock.now = 8.0
    made[0].release()
    await settle()
    assert made[2].waited == 8.0
    # 8 seconds per request, 2 places, 3 waiting and the new one
    assert gate.retry_seconds() == 16
    await end(made)


@in_loop
async def test_retry_after_is_at_most_a_minute() -> None:
    clock = FakeClock()
    gate = Gate(max_running=1, max_waiting=10, clock=clock)
    made = await clients(gate, "a")
    clock.now = 1000.0
    await end(made)
    assert gate.retry_seconds() == 60


@in_loop
async def test_a_cancelled_request_leaves_the_queue() -> None:
    gate = Gate(max_running=1, max_waiting=2)
    made = await clients(gate, "abc")
    made[1].task.cancel()
    await settle()
    assert gate.num_waiting == 1
    made[0].release()
    await settle()
    assert made[2].is_running
    await end(made)
    assert gate.num_running == 0


@in_loop
async def test_a_request_that_is_cancelled_as_it_is_admitted_returns_its_place() -> None:
    gate = Gate(max_running=1, max_waiting=2)
    async with gate.enter("a"):
        made = await clients(gate, "bc")
    assert gate.running_of("b") == 1  # admitted, but its task did not run yet
    assert made[0].waited is None
    made[0].task.cancel()
    await settle()
    assert made[1].is_running
    assert gate.num_running == 1
    await end(made)
    assert gate.num_running == 0


@in_loop
async def test_a_closed_gate_refuses_new_and_waiting_requests_and_keeps_running_ones() -> None:
    gate = Gate(max_running=1, max_waiting=2)
    made = await clients(gate, "ab")
    gate.close()
    late = await clients(gate, "a")
    for refused in (made[1], late[0]):
        assert refused.error is not None
        assert refused.error.status == 503
        assert "Retry-After" in refused.error.headers
    assert made[0].is_running
    await end(made)


@in_loop
async def test_a_request_that_raises_returns_its_place() -> None:
    gate = Gate(max_running=1, max_waiting=0)
    with pytest.raises(ValueError, match="inside"):
        async with gate.enter("a"):
            raise ValueError("inside")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(gate.enter("a"))
    assert gate.num_running == 0
