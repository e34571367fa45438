"""Records on disk: bounded, complete under concurrent writers, and removable."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.loading.warm_start.native_record import Record, parsed
from draftree.loading.warm_start.store import Store
from draftree.models.check import CheckResult
from draftree.models.native.blueprint import Blueprint, LayerBlueprint, LinearBlueprint
from draftree.models.native.rotary import Rope
from draftree.models.native.weights import StoredWeight

LINEAR = LinearBlueprint("w", None, 16, 16)
BIASED = LinearBlueprint("v", "b", 16, 32)
LAYER = LayerBlueprint("n", None, "n", "p", None, None, (LINEAR, BIASED), LINEAR, (BIASED,), LINEAR, 37, 0.1, 0)


MADE_FOR: dict[str, Any] = {"files": [["a", 1, 2]]}


def record() -> Record:
    """Numbers that have no short decimal form."""
    blueprint = Blueprint(
        *("LlamaForCausalLM", "f1", 400, "bfloat16"),
        *(16, 1, 1, 16, 16, 96, 0),
        *(1e-6, 0.0, 1 / 3, 1.0, 0.1),
        embedding="e",
        final_norm="n",
        head=LINEAR,
        ropes=(Rope((1.0, 0.1, 1 / 7), 1.0),),
        layers=(LAYER, replace(LAYER, window=None, rope=None)),
    )
    places = {"w": StoredWeight("model.safetensors", "w", (16, 16))}
    return Record(blueprint, places, CheckResult(1e-3, 2e-3, 0.1, is_exact=True), (5, 7), "abc")


@pytest.fixture(autouse=True)
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    monkeypatch.delenv("DRAFTREE_BLUEPRINTS")
    return lambda text: monkeypatch.setenv("DRAFTREE_BLUEPRINTS", text)


def test_records_are_read_back_exactly() -> None:
    Store().put("a", MADE_FOR, asdict(record()))
    kept = Store().get("a", MADE_FOR)
    assert kept is not None
    assert parsed(kept) == record()


def test_records_of_other_facts_are_ignored() -> None:
    Store().put("a", MADE_FOR, "x")
    assert Store().get("a", {"files": [["a", 1, 3]]}) is None
    assert Store().get("b", MADE_FOR) is None


def test_the_least_recently_used_are_evicted(limit: Callable[[str], None]) -> None:
    Store().put("a", MADE_FOR, "x")
    size = Store().entries()[0][1].st_size
    limit(str(3 * size))
    for age, name in enumerate("bc"):
        Store().put(name, MADE_FOR, "x")
        os.utime(Store().folder / f"{name}.json", ns=(age, age))
    os.utime(Store().folder / "a.json", ns=(0, 0))
    Store().get("a", MADE_FOR)
    Store().put("d", MADE_FOR, "x")
    assert {path.stem for path, _ in Store().entries()} == {"a", "c", "d"}


def test_records_above_the_limit_are_not_stored(limit: Callable[[str], None]) -> None:
    limit("50")
    Store().put("a", MADE_FOR, "x")
    assert Store().entries() == []


def test_a_limit_that_is_not_a_number_is_refused(limit: Callable[[str], None]) -> None:
    limit("many")
    with pytest.raises(ConfigurationError, match=r"DRAFTREE_BLUEPRINTS is 'many': give a number of bytes"):
        Store()


def test_clearing_removes_all_records() -> None:
    for name in "ab":
        Store().put(name, MADE_FOR, "x")
    assert Store().clear() == 2
    assert (Store().entries(), Store().clear()) == ([], 0)


def test_concurrent_readers_read_complete_records() -> None:
    Store().put("a", MADE_FOR, "x" * 10)

    def write(number: int) -> None:
        Store().put("a", MADE_FOR, str(number) * 200_000)

    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, number % 10) for number in range(40)]
        found = [Store().get("a", MADE_FOR) for _ in range(60)]
        for one in writing:
            one.result()
    assert all(one is not None and len(set(one)) == 1 for one in found)
    assert [path.name for path in Store().folder.iterdir()] == ["a.json"]


def test_parts_of_dead_writers_are_swept() -> None:
    Store().put("a", MADE_FOR, "x")
    dead, living = Store().folder / "x.part", Store().folder / "y.part"
    for path in (dead, living):
        path.write_text("half")
    os.utime(dead, (0, 0))
    Store().put("b", MADE_FOR, "x")
    assert (dead.exists(), living.exists()) == (False, True)
