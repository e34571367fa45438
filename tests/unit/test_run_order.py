"""`--random-order SEED` changes the order of tests, loses none, and repeats itself."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

from run_order import in_random_order

ITEMS: list[Any] = [SimpleNamespace(nodeid=f"tests/{file}.py::test_{n}") for file in "abcd" for n in range(8)]


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
