"""Admission and leases of a verify server: sessions that begin at once, answers that take long, refused texts."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgpack
import pytest

from draftree.remote.protocol import VERSION
from draftree.serve.keys import ApiKey
from draftree.serve.verify.service import VerifyService
from draftree.serve.verify.sessions import Talk
from draftree.serve.verify.settings import VerifySettings
from serving import Running, running_server

HELLO = {"t": "hello", "v": VERSION, "model": None}
OPEN = {"t": "open", "id": 1, "text": 1, "prompt": [5, 6, 7], "output": [], "params": {}, "seed": 1, "limit": 20}


def service_of(server: Running) -> VerifyService:
    found = server.server.verify
    assert found is not None
    return found


async def answer(service: VerifyService, message: dict[str, Any], talk: Talk) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(await service.answer(msgpack.packb(message), talk))
    return found


def test_sessions_that_begin_at_once_keep_the_limit() -> None:
    """The first greeting waits for measured passes; the greetings that arrive meanwhile count as well."""
    with running_server(verify=VerifySettings(max_sessions=2)) as server:
        service = service_of(server)

        async def all_at_once() -> list[dict[str, Any]]:
            talks = [Talk(ApiKey("anonymous")) for _ in range(6)]
            return await asyncio.gather(*(answer(service, HELLO, talk) for talk in talks))

        found = asyncio.run_coroutine_threadsafe(all_at_once(), server.loop).result(60)
        kinds = Counter((reply["t"], reply.get("code")) for reply in found)
        assert kinds == {("welcome", None): 2, ("error", "sessions_full"): 4}
        assert len(service.sessions) == 2


def test_a_session_does_not_end_while_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease ends without requests, and not because a pass takes longer than the lease."""
    with running_server(verify=VerifySettings(lease=10.0, park=5.0)) as server:
        service, now = service_of(server), [0.0]
        service._clock = lambda: now[0]

        async def one_long_answer() -> tuple[int, int, dict[str, Any], int, int]:
            talk, may_end = Talk(ApiKey("anonymous")), asyncio.Event()

            async def slow(session: Any, message: dict[str, Any]) -> dict[str, Any]:
                await may_end.wait()
                return {"t": "pong"}

            monkeypatch.setattr(service, "_ping", slow)
            await answer(service, HELLO, talk)
            await answer(service, OPEN | {"plain": False}, talk)
            asked = asyncio.create_task(answer(service, {"t": "ping", "id": 2}, talk))
            await asyncio.sleep(0)
            now[0] += 11.0
            await service.sweep()
            during, parked = len(service.sessions), service.counts["parked"]
            may_end.set()
            reply = await asked
            now[0] += 9.0
            await service.sweep()
            after = len(service.sessions)
            now[0] += 2.0
            await service.sweep()
            return during, parked, reply, after, len(service.sessions)

        found = asyncio.run_coroutine_threadsafe(one_long_answer(), server.loop).result(60)
        assert found == (1, 0, {"t": "pong", "id": 2}, 1, 0), "the lease is counted from the answer on"


def test_texts_that_are_refused_leave_no_entry_in_the_metrics() -> None:
    with running_server(verify=VerifySettings()) as server:
        service = service_of(server)
        (meter,) = server.server.meters.values()

        async def refused() -> list[str]:
            talk = Talk(ApiKey("anonymous"))
            await answer(service, HELLO, talk)
            wrong = [{"regex": "(" * 50}, {"grammar": "root ::="}, {"stop": [""]}]
            return [
                (await answer(service, OPEN | {"plain": place == 0, "id": place + 1, "params": params}, talk))["t"]
                for place, params in enumerate(wrong)
            ]

        before = dict(meter._active)
        assert asyncio.run_coroutine_threadsafe(refused(), server.loop).result(60) == ["error"] * 3
        assert meter._active == before
