"""`--random-order` and `--tier`: which tests run, and in which order."""

from __future__ import annotations

import itertools
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from run_order import in_random_order
from tiers import Duration, Tier, covering_sample, read_durations, selected

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


class Item(SimpleNamespace):
    """A test as the selection sees it."""

    __hash__ = object.__hash__


def product(function: str, *sizes: int, markers: tuple[str, ...] = ()) -> list[Any]:
    """Tests of a function with parameters p0, p1, …; p0 has a second name with the same values."""
    return [
        Item(
            nodeid=f"{function}[{'-'.join(map(str, row))}]",
            callspec=SimpleNamespace(indices={f"p{place}": value for place, value in enumerate(row)} | {"q": row[0]}),
            get_closest_marker=lambda name: name if name in markers else None,
        )
        for row in itertools.product(*map(range, sizes))
    ]


def values(items: list[Any], *names: str) -> set[tuple[int, ...]]:
    return {tuple(item.callspec.indices[name] for name in names) for item in items}


def test_a_sample_covers_all_pairs_of_three_parameters() -> None:
    sample = covering_sample(product("tests/a.py::test", 6, 5, 4))
    assert len(sample) < 45
    for names in itertools.combinations(("p0", "p1", "p2"), 2):
        assert values(sample, *names) == values(product("tests/a.py::test", 6, 5, 4), *names)


def test_a_sample_of_two_parameters_has_every_value() -> None:
    sample = covering_sample(product("tests/a.py::test", 7, 3))
    assert len(sample) == 7
    assert (len(values(sample, "p0")), len(values(sample, "p1"))) == (7, 3)


def test_one_parameter_is_not_sampled() -> None:
    assert len(covering_sample(product("tests/a.py::test", 9))) == 9


def test_a_tier_takes_functions_whole_or_sampled_within_its_limit() -> None:
    tier = Tier(2.0, folders=("tests/",), complete=("tests/exact/",), excluded=("weights",))
    durations = {
        "tests/a.py::fast": Duration(12, 1.0),
        "tests/a.py::sampled": Duration(12, 6.0),
        "tests/a.py::long": Duration(12, 60.0),
        "tests/a.py::essential": Duration(12, 60.0),
        "tests/exact/a.py::long": Duration(12, 60.0),
    }
    items = [
        *(item for name in durations for item in product(name, 4, 3, markers=("essential",) * ("essential" in name))),
        *product("tests/a.py::new", 4, 3),
        *product("tests/a.py::fetching", 4, markers=("weights",)),
        *product("benchmarks/a.py::new", 4),
    ]
    kept = [item.nodeid.partition("[")[0] for item in selected(items, tier, durations)]
    assert {name: kept.count(name) for name in kept} == {
        "tests/a.py::fast": 12,
        "tests/a.py::sampled": 4,
        "tests/a.py::essential": 4,
        "tests/exact/a.py::long": 12,
        "tests/a.py::new": 12,
    }


def test_the_table_names_files_that_exist() -> None:
    files = {name.partition("::")[0] for name in read_durations()}
    root = Path(__file__).parents[2]
    assert files
    assert [file for file in sorted(files) if not (root / file).exists()] == [], "run `make durations`"
