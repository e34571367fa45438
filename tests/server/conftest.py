"""Servers that all tests of a process share, clients of them, and a browser.

A file with a server of its own overrides `server`; `client` and `http` follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from browser import Browser, open_browser
from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from draftree.serve.verify import VerifySettings
from serving import ALIAS, NAME, Running, running_server, tiny_async_llm, tiny_model
from split_devices import save_split_model, split_server
from text_backends import byte_level
from tool_templates import CHAT_ONLY, TEMPLATES
from verify_clients import check_empty, drop_sessions, service_of


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Running]:
    """A server with the tiny model and the drafter `ngram`."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def families() -> Iterator[Running]:
    """The tiny model, one model for each template with tools, one for a template without, and one for no template."""
    models = [
        ServedModel(name, AsyncLLM(tiny_model(context=2048), "ngram", plan="fixed", tokenizer=byte_level(template)))
        for name, template in {**TEMPLATES, "toolless": CHAT_ONLY}.items()
    ]
    models.append(ServedModel("mute", AsyncLLM(tiny_model(), "none", tokenizer=byte_level(None))))
    with running_server([ServedModel(NAME, tiny_async_llm(plan="fixed"), (ALIAS,)), *models]) as running:
        yield running


@pytest.fixture(scope="session")
def shared_verify_server() -> Iterator[Running]:
    with running_server(verify=VerifySettings()) as running:
        yield running


@pytest.fixture
def verify_server(shared_verify_server: Running) -> Iterator[Running]:
    """A verify server. At the end no text is left in it, and the engine's bookkeeping is sound."""
    yield shared_verify_server
    drop_sessions(shared_verify_server)
    check_empty(shared_verify_server)


@pytest.fixture(scope="session")
def split_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_split_model(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="session")
def shared_split_server(split_folder: Path) -> Iterator[Running]:
    with split_server(split_folder) as running:
        yield running


@pytest.fixture
def layers_server(shared_split_server: Running) -> Iterator[Running]:
    """A verify server that takes hidden states of the model in `split_folder`; checked as `verify_server`."""
    yield shared_split_server
    drop_sessions(shared_split_server)
    check_empty(shared_split_server)
    assert service_of(shared_split_server).layers.num_active == 0


@pytest.fixture
def server(tiny_server: Running) -> Running:
    return tiny_server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=600) as client:
        yield client


@pytest.fixture(scope="session")
def shared_browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """A browser. The test fails if a page logs an error or breaks its policy, except for refused requests."""
    shared_browser.emulate()
    shared_browser.devtools("Storage.clearDataForOrigin", origin="*", storageTypes="local_storage")
    shared_browser.log()
    yield shared_browser
    unexpected = [line for line in shared_browser.log() if "Failed to load resource" not in line]
    assert unexpected == []
