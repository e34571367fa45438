"""`--random-order SEED` changes the order of tests, loses none, and is reproducible."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from run_order import in_random_order
from slow_files import SLOW

ITEMS: list[Any] = [SimpleNamespace(nodeid=f"tests/{file}.py::test_{n}") for file in "abcd" for n in range(8)]


def test_every_slow_file_is_there_and_marked(request: pytest.FixtureRequest) -> None:
    found = {path.stem for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert found >= SLOW
    for item in request.session.items:
        assert (item.path.stem in SLOW) == (item.get_closest_marker("slow") is not None)


def names(items: list[Any]) -> list[str]:
    return [item.nodeid for item in items]


def test_every_test_runs_once_and_files_stay_whole() -> None:
    found = names(in_random_order(ITEMS, 1))
    assert sorted(found) == sorted(names(ITEMS))
    assert found != names(ITEMS)
    assert len([file for file, _ in groupby(name.partition("::")[0] for name in found)]) == 4


def test_a_seed_repeats_its_order_whatever_order_was_collected() -> None:
    assert names(in_random_order(ITEMS, 1)) == names(in_random_order(ITEMS[::-1], 1))
    assert len({tuple(names(in_random_order(ITEMS, seed))) for seed in range(5)}) == 5
