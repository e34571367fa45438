"""Admission: limits, a bounded queue, fair shares of keys, priorities, requests with several texts."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.serve.errors import ApiError
from draftree.serve.gate import Gate
from event_loop import in_loop


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Client:
    """One request that stays at the gate until it is released."""

    def __init__(self, gate: Gate, key: str, *, texts: int = 1, priority: int = 0) -> None:
        self.key, self.texts, self.priority = key, texts, priority
        self.waited: float | None = None
        self.error: ApiError | None = None
        self._done = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(gate))

    async def _run(self, gate: Gate) -> None:
        try:
            async with gate.enter(self.key, texts=self.texts, priority=self.priority) as ticket:
                self.waited = ticket.waited
                await self._done.wait()
        except ApiError as error:
            self.error = error

    @property
    def is_running(self) -> bool:
        return self.waited is not None and not self.task.done()

    @property
    def is_waiting(self) -> bool:
        return self.waited is None and not self.task.done()

    def release(self) -> None:
        self._done.set()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def arrival(gate: Gate, key: str, *, texts: int = 1, priority: int = 0) -> Client:
    """A client that has arrived."""
    made = Client(gate, key, texts=texts, priority=priority)
    await settle()
    return made


async def clients(gate: Gate, keys: str) -> list[Client]:
    """One client for each letter, in this order."""
    return [await arrival(gate, key) for key in keys]


async def end(made: list[Client]) -> None:
    for client in made:
        client.release()
    await asyncio.gather(*(client.task for client in made), return_exceptions=True)


@in_loop
async def test_a_full_queue_refuses_with_503_and_retry_after() -> None:
    gate = Gate(max_running=1, max_waiting=1)
    made = await clients(gate, "aaa")
    error = made[2].error
    assert error is not None
    assert (error.status, error.code, error.headers) == (503, "queue_full", {"Retry-After": "1"})
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
async def test_a_request_that_is_cancelled_as_it_is_admitted_returns_its_place() -> None:
    gate = Gate(max_running=1, max_waiting=2)
    async with gate.enter("a"):
        made = await clients(gate, "bc")
    assert gate.num_places == 1  # admitted, but its task did not run yet
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


@in_loop
async def test_a_full_queue_makes_room_for_a_key_with_fewer_requests() -> None:
    gate = Gate(max_running=1, max_waiting=3)
    made = await clients(gate, "aaaab")
    assert made[3].error is not None
    assert (made[3].error.status, made[3].error.code) == (429, "key_limit")
    assert made[4].is_waiting
    late = await clients(gate, "b")
    assert late[0].error is not None, "two waiting each: no request makes room"
    assert late[0].error.status == 503
    await end(made + late)


@in_loop
async def test_a_key_that_holds_its_share_of_the_queue_is_refused_with_429() -> None:
    gate = Gate(max_running=1, max_waiting=4, key_share=0.5)
    made = await clients(gate, "aaaab")
    error = made[3].error
    assert error is not None
    assert (error.status, error.code) == (429, "key_limit")
    assert "Retry-After" in error.headers
    assert made[4].is_waiting
    await end(made)


@in_loop
async def test_priorities_order_the_requests_of_one_key() -> None:
    gate = Gate(max_running=1, max_waiting=10)
    made = [await arrival(gate, "a", priority=priority) for priority in (0, 5, 0, -3, 5, -3)]
    order = []
    for _ in made:
        (running,) = [place for place, client in enumerate(made) if client.is_running]
        order.append(running)
        made[running].release()
        await settle()
    assert order == [0, 3, 5, 2, 1, 4]
    await end(made)


@in_loop
async def test_priorities_do_not_pass_other_keys() -> None:
    orders = []
    for priority in (0, -1000):
        gate = Gate(max_running=1, max_waiting=10)
        made = await clients(gate, "abb")
        made += [await arrival(gate, "a", priority=priority) for _ in range(3)]
        order = []
        for _ in made:
            (running,) = [client for client in made if client.is_running]
            order.append(running.key)
            running.release()
            await settle()
        orders.append("".join(order))
        await end(made)
    assert orders == ["ababaa"] * 2


@in_loop
async def test_the_last_in_order_of_a_key_makes_room_for_another_key() -> None:
    gate = Gate(max_running=1, max_waiting=3)
    made = [await arrival(gate, "a", priority=priority) for priority in (0, 7, 0, 0)]
    made.append(await arrival(gate, "b"))
    assert [client.error is not None for client in made] == [False, True, False, False, False]
    await end(made)


@in_loop
async def test_a_large_request_keeps_its_turn_until_enough_places_are_free() -> None:
    gate = Gate(max_running=4, max_waiting=10)
    made = await clients(gate, "aaaa")
    large = await arrival(gate, "b", texts=3)
    made += await clients(gate, "aaa")
    for client in made[:2]:
        client.release()
        await settle()
        assert large.is_waiting
        assert gate.num_waiting == 4, "no smaller request takes the places that become free"
    made[2].release()
    await settle()
    assert large.is_running
    await end([*made, large])


ARRIVALS = st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.integers(-1, 1))
SINGLE = st.tuples(st.sampled_from("abcd"), st.just(1), st.just(0))
ENDS = st.integers(0, 50)


def events_of(arrivals: Any) -> Any:
    return st.lists(st.one_of(arrivals, arrivals, ENDS, st.tuples(ENDS)), max_size=60)


SHARES = st.sampled_from([0.3, 0.5, 1.0])


@given(events_of(SINGLE), st.integers(1, 4), st.integers(0, 6), SHARES)
def test_limits_hold_and_no_key_starves(events: list[Any], max_running: int, max_waiting: int, share: float) -> None:
    asyncio.run(check(Gate(max_running=max_running, max_waiting=max_waiting, key_share=share), events))


async def check(gate: Gate, events: list[Any], *, counts: bool = True) -> None:
    """A key with texts and priority arrives, a number ends a running request, a tuple of one cancels a waiting one."""
    made: list[Client] = []
    passed: Counter[str] = Counter()
    """Admissions of other keys while a key with no running request waits."""
    for event in events:
        before = [client for client in made if client.is_running]
        waiting = [client for client in made if client.is_waiting]
        if isinstance(event, tuple) and len(event) == 3:
            key, texts, priority = event
            made.append(Client(gate, key, texts=texts, priority=priority))
        elif isinstance(event, int) and before:
            before[event % len(before)].release()
        elif isinstance(event, tuple) and waiting:
            waiting[event[0] % len(waiting)].task.cancel()
        await settle()
        check_limits(gate, made)
        admitted = [client.key for client in made if client.is_running and client not in before]
        idle = {client.key for client in made if client.is_waiting} - {c.key for c in made if c.is_running}
        for key in list(passed):
            if key not in idle:
                del passed[key]
        for key in idle:
            passed[key] += len(admitted)
            assert passed[key] <= 4 or not counts, f"key {key} was passed too often"
    await drain(gate, made)


async def drain(gate: Gate, made: list[Client]) -> None:
    """End running requests until none is left: every waiting request has its turn."""
    while running := [client for client in made if client.is_running]:
        for client in running:
            client.release()
        await settle()
    assert (gate.num_running, gate.num_places, gate.num_waiting) == (0, 0, 0)
    assert all(client.task.done() for client in made)


def places_of(gate: Gate, client: Client) -> int:
    return min(client.texts, gate.max_running_per_key)


def check_limits(gate: Gate, made: list[Client]) -> None:
    running: Counter[str] = Counter()
    for client in made:
        if client.is_running:
            running[client.key] += places_of(gate, client)
    waiting = [client for client in made if client.is_waiting]
    assert gate.num_running == sum(client.is_running for client in made)
    assert running.total() == gate.num_places <= gate.max_running
    assert len(waiting) == gate.num_waiting <= gate.max_waiting
    assert all(count <= gate.max_running_per_key for count in running.values())
    # of a key's requests, only the first one can be admitted
    first = {client.key: client for client in sorted(waiting, key=lambda client: client.priority, reverse=True)}
    first |= {c.key: c for c in reversed(waiting) if c.priority == first[c.key].priority}
    in_share = [c for key, c in first.items() if running[key] + places_of(gate, c) <= gate.max_running_per_key]
    fitting = [c for c in in_share if gate.num_places + places_of(gate, c) <= gate.max_running]
    assert len(fitting) < max(1, len(in_share)), "no place stays free unless a larger request has the turn"


@given(events_of(ARRIVALS), st.integers(1, 8), st.integers(0, 6), SHARES)
def test_limits_hold_for_requests_with_several_texts(
    events: list[Any], max_running: int, max_waiting: int, share: float
) -> None:
    asyncio.run(check(Gate(max_running=max_running, max_waiting=max_waiting, key_share=share), events, counts=False))


@given(st.lists(st.integers(0, 50), min_size=40, max_size=40), st.integers(1, 6))
def test_places_are_shared_equally_while_all_keys_have_requests(ends: list[int], max_running: int) -> None:
    asyncio.run(check_shares(max_running, ends))


async def check_shares(max_running: int, ends: list[int]) -> None:
    gate = Gate(max_running=max_running, max_waiting=300)
    made = await clients(gate, "a" * 60)  # the first key holds every place
    made += await clients(gate, "bc" * 60)
    for number in ends:
        running = [client for client in made if client.is_running]
        before = Counter(client.key for client in running)
        leaver = running[number % len(running)]
        before[leaver.key] -= 1
        leaver.release()
        await settle()
        (new,) = [client for client in made if client.is_running and client not in running]
        assert before[new.key] == min(before[key] for key in "abc"), "the place goes to a key with the fewest"
    await end(made)
