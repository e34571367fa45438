"""The soak test for some seconds: nothing is lost, leaked or wrong."""

from __future__ import annotations

import argparse
import asyncio
import logging
from types import ModuleType

import pytest

from benchmark_scripts import script


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return script("soak")


@pytest.mark.parametrize("draft", ["none", "suffix,floor=0"])
def test_a_short_soak(soak: ModuleType, draft: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="draftree")
    given = argparse.Namespace(
        model="table", draft=draft, seconds=1.0, clients=16, batch=4, faults=0.01, seed=3, requests=24
    )
    found = asyncio.run(soak.soak(given))
    assert found["wrong"] == []
    assert found["counts"]["done"] > 0
    assert found["counts"]["steps"] > 0
