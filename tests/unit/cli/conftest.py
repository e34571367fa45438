"""Tiny model folders that tests read, and `draftree generate`."""

from __future__ import annotations

import pytest

from cli_samples import DEMO_CONTEXT, Generate, generating, save_tiny_model


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("base"), chat=False))


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("chat"), chat=True, context=DEMO_CONTEXT))


@pytest.fixture
def generate(capfd: pytest.CaptureFixture[str]) -> Generate:
    return generating(capfd)
