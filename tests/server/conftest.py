"""One server with the tiny model for all tests of a file, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from browser import Browser, open_browser
from fake_serving import fake_server
from serving import Running, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for tests of the page."""
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a scripted server with the page."""
    with fake_server() as served:
        yield served


@pytest.fixture
def clean_log(browser: Browser) -> Iterator[None]:
    """Fails if the page logged an error or broke its own policy, except for the requests that a test has refused."""
    browser.emulate()
    browser.log()
    yield
    unexpected = [line for line in browser.log() if "Failed to load resource" not in line]
    assert unexpected == []
