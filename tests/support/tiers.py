"""Tiers of tests: which ones `make quick` and `make test` run, from recorded seconds alone. `make test-all` runs all.

`tests/durations.csv` has the seconds of each test function over all of its cases; `make durations` records it. Of a
function that takes longer than the tier's limit, the tier runs a covering sample of its product of parameters: every
pair of values of two parameters occurs in it; of a product of two parameters, every value. If the sample is over the
limit too, the function is not in the tier, unless it is marked `essential`. Functions without a record are fast or new,
and are in every tier.
"""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

SHORTEST = 0.1
"""Functions that take fewer seconds are not recorded."""
TABLE = Path(__file__).parents[1] / "durations.csv"
COMPLETE = ("tests/contract/", "tests/exact/", "tests/statistical/", "tests/theory/")
"""Folders of which `make test` runs every case."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A part of the tests.

    Attributes:
        limit: most seconds of a function's cases that are run.
        folders: beginnings of the paths of its files.
        complete: folders of which every case is run.
        excluded: markers of tests that are not in it.
    """

    limit: float
    folders: tuple[str, ...] = ("tests/",)
    complete: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


TIERS = {
    "quick": Tier(0.1, folders=("tests/unit/", "tests/exact/"), excluded=("weights", "install", "kernels")),
    "test": Tier(2.0, complete=COMPLETE, excluded=("weights", "install", "kernels")),
}


NO_PARAMETERS = SimpleNamespace(indices={})


@dataclass(frozen=True, slots=True)
class Duration:
    """Recorded cases of a function and their seconds in all."""

    cases: int
    seconds: float


def read_durations(path: Path = TABLE) -> dict[str, Duration]:
    """Read the table: durations by `file::function`."""
    with path.open(newline="", encoding="utf-8") as file:
        return {row["function"]: Duration(int(row["cases"]), float(row["seconds"])) for row in csv.DictReader(file)}


def selected(items: Sequence[pytest.Item], tier: Tier, durations: dict[str, Duration]) -> list[pytest.Item]:
    """Return the tests of a tier, in their order."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[function_of(item.nodeid)].append(item)
    kept = {item for name, cases in functions.items() for item in _of_function(name, cases, tier, durations)}
    return [item for item in items if item in kept]


def function_of(nodeid: str) -> str:
    """Return `file::function` of a test."""
    return nodeid.partition("[")[0]


def _of_function(
    name: str, cases: Sequence[pytest.Item], tier: Tier, durations: dict[str, Duration]
) -> Sequence[pytest.Item]:
    if not name.startswith(tier.folders):
        return []
    is_essential = cases[0].get_closest_marker("essential") is not None
    if not is_essential:
        cases = [case for case in cases if not any(case.get_closest_marker(marker) for marker in tier.excluded)]
    recorded = durations.get(name, Duration(1, 0.0))
    if not cases or recorded.seconds <= tier.limit or name.startswith(tier.complete):
        return cases
    sample = covering_sample(cases)
    seconds = recorded.seconds * len(sample) / max(recorded.cases, len(cases))
    return sample if is_essential or seconds <= tier.limit else []


def covering_sample(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return cases that cover all pairs of values of two parameters; of fewer than three parameters, all values."""
    indices = [getattr(case, "callspec", NO_PARAMETERS).indices for case in cases]
    # names that are parametrized together have the same column, and are one parameter
    columns = sorted({tuple(row[name] for row in indices) for name in indices[0]})
    if len(columns) < 2:
        return list(cases)
    strength = min(2, len(columns) - 1)
    covered = [_combinations(row, strength) for row in zip(*columns, strict=True)]
    missing, chosen = set().union(*covered), set()
    while missing:
        best = max(range(len(cases)), key=lambda place: (len(covered[place] & missing), -place))
        missing -= covered[best]
        chosen.add(best)
    return [case for place, case in enumerate(cases) if place in chosen]


def _combinations(row: Sequence[int], strength: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), strength))


class Recorder:
    """A plugin that writes the table at the end of a run of all tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cases: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a test."""
        name = function_of(report.nodeid)
        self._cases[name].add(report.nodeid)
        self._seconds[name] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        with self._path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["function", "cases", "seconds"])
            for name, seconds in sorted(self._seconds.items()):
                if seconds >= SHORTEST:
                    table.writerow([name, len(self._cases[name]), f"{seconds:.1f}"])
