"""The soak, for seconds: nothing is lost, leaked or wrong."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("soak", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("draft", ["none", "suffix,floor=0"])
def test_a_short_soak(script: Any, draft: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="draftree")
    given = argparse.Namespace(
        model="table", draft=draft, seconds=3.0, clients=16, batch=4, faults=0.01, seed=3, requests=24
    )
    found = asyncio.run(script.soak(given))
    assert found["wrong"] == []
    assert found["counts"]["done"] > 0
    assert found["counts"]["steps"] > 0
