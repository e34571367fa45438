"""Settings of all tests. Helpers are in `support`, which is on the path."""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may depend on a network
os.environ["DRAFTREE_BLUEPRINTS"] = "0"  # every start is a first one, unless a test overrides it
# no test reads what the user has kept
os.environ["DRAFTREE_CONFIG"] = str(Path(tempfile.gettempdir()) / f"draftree-test-config-{os.getpid()}")
# without a GPU, Triton interprets its kernels; it reads this when it is first imported, which torch may do
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")
os.environ["COLUMNS"] = "80"  # help and tables are as wide as that, whatever the terminal
os.environ.pop("FORCE_COLOR", None)  # this and the next two: no colours unless requested
os.environ.pop("PY_COLORS", None)
os.environ.pop("GITHUB_ACTIONS", None)

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging as transformers_logging

from run_order import in_random_order
from tiers import TABLE, TIERS, Recorder, read_durations, selected

signal.signal(signal.SIGINT, signal.default_int_handler)  # which programs started in the background ignore
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
settings.register_profile("house", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("house")

ORDER, THREADS, TIER, RECORD = "--random-order", "--threads", "--tier", "--record-durations"
METHODS = Path(__file__).parent / "methods"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        ORDER, type=int, metavar="SEED", help="run files, and the tests of each file, in the random order of this seed"
    )
    parser.addoption(
        TIER, choices=[*TIERS, "rest", "all"], default="all", help="tests of a tier; rest: those that `test` leaves"
    )
    parser.addoption(RECORD, action="store_true", help=f"write the seconds of each function to {TABLE.name}")
    parser.addoption(
        THREADS, type=int, metavar="N", default=1, help="threads of torch and of native kernels (default 1)"
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption(THREADS))
    if config.getoption(RECORD) and not hasattr(config, "workerinput"):  # workers of xdist report to the first process
        config.pluginmanager.register(Recorder(TABLE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Threads that a test sets, or a command that it runs, are not the next test's."""
    try:
        return (yield)
    finally:
        torch.set_num_threads(item.config.getoption(THREADS))


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption(ORDER)
    return [] if seed is None else [f"random order: {ORDER}={seed}"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption(TIER)
    if tier != "all":
        kept = set(selected(items, TIERS["test" if tier == "rest" else tier], read_durations()))
        dropped = [item for item in items if (item in kept) == (tier == "rest")]
        items[:] = [item for item in items if (item in kept) != (tier == "rest")]
        config.hook.pytest_deselected(items=dropped)
    seed = config.getoption(ORDER)
    if seed is not None:
        items[:] = in_random_order(items, seed)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Scripts by name: while the test runs, `scripted:NAME` is a drafter that drafts from the script."""
    package = importlib.import_module("draftree.drafters")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(METHODS)])
    drafter = importlib.import_module("draftree.drafters.scripted").ScriptedDrafter
    found: dict[str, Any] = {}
    monkeypatch.setattr(drafter, "scripts", found)
    return found
