"""Devices whose connections, sessions and servers fail: the text stays the same, and no slot is lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from draftree.core.errors import GenerationError
from draftree.remote.address import RemoteAddress
from draftree.remote.link import Link, Patience
from draftree.remote.transport import PostTransport, Transport, WebSocketTransport
from draftree.serve.verify import VerifySettings
from faulty import faulty, proxied
from serving import Running, running_server
from verify_clients import (
    PARAMS,
    PROMPTS,
    check_empty,
    connector,
    device,
    drop_sessions,
    plain_texts,
    service_of,
    texts_of,
)


@pytest.fixture
def server(verify_server: Running) -> Running:
    return verify_server


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return plain_texts()


@pytest.mark.parametrize("kind", [WebSocketTransport, PostTransport])
@pytest.mark.parametrize("draft", ["suffix,min=1", None])
def test_lost_and_repeated_frames(
    server: Running, expected: list[list[int]], kind: type[Any], draft: str | None
) -> None:
    flaky, counts = faulty(connector(server, kind), seed=7)
    before = service_of(server).status()["repeated"]
    with device(server, draft, connector=flaky) as llm:
        assert texts_of(llm) == expected
        assert service_of(server).status()["repeated"] > before
        assert llm.model.link.latency.reopened == 0, "sessions resume"
    assert {"lost request", "lost reply", "cut"} < set(counts)
    check_empty(server)


def test_connections_that_are_cut(server: Running, expected: list[list[int]]) -> None:
    with proxied(server.url, [900, 1500, 700, 2500]) as proxy, device(proxy.url) as llm:
        assert texts_of(llm) == expected
        assert proxy.num_cut == 4
    check_empty(server)


@pytest.mark.parametrize("draft", ["suffix,min=1", None])
def test_a_server_that_forgets_its_sessions(server: Running, expected: list[list[int]], draft: str | None) -> None:
    updates: list[Any] = []

    def forget(update: Any) -> None:
        updates.append(update)
        if len(updates) in (2, 9, 20):
            drop_sessions(server)

    with device(server, draft) as llm:
        found = llm.generate(list(PROMPTS), list(PARAMS), on_update=forget)
        assert [list(one.token_ids) for one in found] == expected
        assert llm.model.link.latency.reopened > 0
    check_empty(server)


def test_another_server_goes_on(server: Running, expected: list[list[int]]) -> None:
    with running_server(verify=VerifySettings()) as other:
        homes, opened = [server, other, server], []

        def connect() -> Transport:
            transport = connector(homes[len(opened) % 3], WebSocketTransport)()
            opened.append(transport)
            return transport

        def leave(update: Any) -> None:
            if update.sequence.index == 0 and len(update.sequence.history) % 7 == 0:
                opened[-1].close()

        with device(server, connector=connect) as llm:
            found = llm.generate(list(PROMPTS), list(PARAMS), on_update=leave)
            assert [list(one.token_ids) for one in found] == expected
            assert len(opened) > 2
        for one in (server, other):  # a session ends with its lease where its device does not come back
            drop_sessions(one)
            check_empty(one)


def test_a_server_that_is_gone_is_reported() -> None:
    short = Patience(reply=5.0, total=0.05, first_pause=0.01, longest_pause=0.01)
    with running_server(verify=VerifySettings()) as server, device(server, patience=short) as llm:
        llm.model.link._connector = connector_of_nothing
        llm.model.link._disconnect()
        with pytest.raises(GenerationError, match=r"did not answer within 0\.05 s"):
            llm.generate("The quick brown fox")
        llm.engine.check_integrity()


def test_a_server_that_never_answered_is_reported_soon() -> None:
    patience = Patience(reply=1.0, total=60.0, first=5.0)
    waits: list[float] = []
    with pytest.raises(GenerationError, match="did not answer within 5 s"):
        Link(
            RemoteAddress.parse("remote:http://127.0.0.1:9"),
            None,
            patience=patience,
            connector=connector_of_nothing,
            clock=lambda: sum(waits),
            sleep=waits.append,
        )
    assert 1 < sum(waits) <= 5


def connector_of_nothing() -> Transport:
    return WebSocketTransport(RemoteAddress.parse("remote:http://127.0.0.1:9"), None, timeout=1.0)


def test_idle_sessions_are_looked_for_again_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(verify=VerifySettings(lease=0.2, park=0.2)) as server:
        service, tries, again = service_of(server), list[int](), threading.Event()

        async def sweep() -> None:
            tries.append(len(tries))
            if len(tries) > 1:
                again.set()
            raise RuntimeError("one session is odd")

        monkeypatch.setattr(service, "sweep", sweep)
        with device(server) as llm:
            texts_of(llm)
            assert again.wait(600)


def test_idle_texts_free_their_slots_and_leases_end(expected: list[list[int]]) -> None:
    with running_server(verify=VerifySettings(lease=100.0, park=10.0)) as server:
        service, now = service_of(server), [0.0]
        service._clock = lambda: now[0]
        sweep = lambda: asyncio.run_coroutine_threadsafe(service.sweep(), server.loop).result()  # noqa: E731
        parked = []

        def idle(update: Any) -> None:
            now[0] += 11.0
            if len(parked) < 5:
                sweep()
                parked.append(server.llm._driver.call(lambda: len(server.llm.llm.engine.running)).result())

        with device(server) as llm:
            found = llm.generate(list(PROMPTS), list(PARAMS), on_update=idle)
            assert [list(one.token_ids) for one in found] == expected
            assert min(parked) == 0, "all texts were parked"
            assert service.counts["parked"] >= 4
            assert len(service.sessions) == 1
            now[0] += 101.0
            sweep()
            assert not service.sessions
            assert texts_of(llm) == expected, "a new session begins by itself"
        check_empty(server)
