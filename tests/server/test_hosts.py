"""Without keys, only names of this machine and no pages of other sites: protection from DNS rebinding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from draftree.serve.access import KeyRing
from draftree.serve.verify import VerifySettings
from serving import HTTP, Running, running_server, settings

REBOUND = {"Host": "evil.example", "Origin": "http://evil.example"}


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    given = settings(allowed_hosts=("gpu.local",), cors_origins=("https://chat.example",))
    with running_server(settings_given=given, verify=VerifySettings()) as running:
        yield running


def status(server: Running, **headers: str) -> tuple[int, Any]:
    answer = HTTP.get(f"{server.url}/v1/models", headers=headers)
    return answer.status_code, None if answer.is_success else answer.json()["error"]["code"]


def test_a_name_that_was_rebound_to_this_machine_is_refused(server: Running) -> None:
    assert status(server, **REBOUND) == (403, "host_not_allowed")
    body = {"prompt": "a", "max_tokens": 1}
    assert HTTP.post(f"{server.url}/v1/completions", json=body, headers=REBOUND).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:8000", "127.9.9.9", "[::1]", "[::1]:8000"]
)
def test_names_of_this_machine_are_served(server: Running, host: str) -> None:
    assert status(server, Host=host, Origin=f"http://{host}") == (200, None)


@pytest.mark.parametrize(
    "host", ["localhost.evil.example", "127.0.0.1.evil.example", "192.168.0.1", "gpu.local", "[::1"]
)
def test_other_names_are_refused(server: Running, host: str) -> None:
    assert status(server, Host=host) == (403, "host_not_allowed")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://evil.example:8000"])
def test_pages_of_other_sites_are_refused(server: Running, origin: str) -> None:
    assert status(server, Origin=origin) == (403, "origin_not_allowed")


def test_names_and_origins_can_be_allowed(named: Running) -> None:
    assert status(named, Host="gpu.local:9000", Origin="http://gpu.local:9000") == (200, None)
    assert status(named, Origin="https://chat.example") == (200, None)
    assert status(named, Origin="https://evil.example") == (403, "origin_not_allowed")


def test_a_page_of_another_site_opens_no_websocket(named: Running) -> None:
    url = named.url.replace("http", "ws") + "/v1/verify"
    with connect(url):
        pass
    with pytest.raises(InvalidStatus) as caught:
        connect(url, origin="https://evil.example")  # type: ignore[arg-type]
    assert caught.value.response.status_code == 403


def test_with_keys_or_for_other_machines_every_name_is_served() -> None:
    keys = KeyRing.load(None, (), variables={"DRAFTREE_API_KEYS": "sk-alice-1234"})
    with running_server(keys=keys) as running:
        answer = httpx.get(f"{running.url}/v1/models", headers={**REBOUND, "Authorization": "Bearer sk-alice-1234"})
        assert answer.status_code == 200
    with running_server(settings_given=settings(host="0.0.0.0", allow_no_key=True)) as running:
        assert status(running, **REBOUND) == (200, None)
