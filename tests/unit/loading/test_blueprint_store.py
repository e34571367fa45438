"""Records on disk: one for each name, whole while others write, and gone when they are cleared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.loading.native_start import Record, parsed_record
from draftree.loading.records import Store
from draftree.models.base import CheckResult
from draftree.models.native.blueprint import (
    Blueprint,
    LayerBlueprint,
    LinearBlueprint,
    LinearRecurrence,
    MixerBlueprint,
    OutputPart,
    Rope,
    ScoreBias,
    ShortConvolution,
    SourceBlueprint,
)
from draftree.models.native.weights import StoredWeight

LINEAR = LinearBlueprint("w", None, 16, 16)
BIASED = LinearBlueprint("v", "b", 16, 32)
LAYER = LayerBlueprint("n", None, "n", "p", None, None, (LINEAR, BIASED), LINEAR, (BIASED,), LINEAR, 37, 0.1, 0)


STATES = LinearRecurrence(2, "c", "b", 4, 4, 2, 2, 16, 32, "d", "s", "n", 2, 1e-6, is_norm_first=False)

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
        layers=(
            LAYER,
            replace(LAYER, window=None, rope=None),
            replace(
                LAYER, qkv=(replace(LINEAR, part=OutputPart(2, 0, 4)),), recurrence=ShortConvolution("c", None, 3, 16)
            ),
            replace(LAYER, source=SourceBlueprint("n", LINEAR, BIASED, 1 / 3), score_bias=0),
            replace(LAYER, beside=MixerBlueprint((LINEAR, BIASED), STATES, replace(LINEAR, factor=1 / 7))),
        ),
        score_biases=(ScoreBias("t", (0, 1, 1)),),
    )
    places = {"w": StoredWeight("model.safetensors", "w", (16, 16))}
    return Record(blueprint, places, CheckResult(1e-3, 2e-3, 0.1, is_exact=True), (5, 7), "abc")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    monkeypatch.delenv("DRAFTREE_BLUEPRINTS")


def test_records_are_read_back_exactly() -> None:
    Store().put("a", MADE_FOR, asdict(record()))
    kept = Store().get("a", MADE_FOR)
    assert kept is not None
    assert parsed_record(kept) == record()


def test_records_of_other_facts_are_ignored() -> None:
    Store().put("a", MADE_FOR, "x")
    assert Store().get("a", {"files": [["a", 1, 3]]}) is None
    assert Store().get("b", MADE_FOR) is None


def test_a_newer_record_of_the_same_name_takes_the_place_of_the_older() -> None:
    for files in ("x", "y"):
        Store().put("a", {"files": files}, files)
    assert len(Store().entries()) == 1
    assert Store().get("a", {"files": "x"}) is None
    assert Store().get("a", {"files": "y"}) == "y"


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_on in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("DRAFTREE_BLUEPRINTS", value)
        assert Store().is_on is is_on
    monkeypatch.setenv("DRAFTREE_BLUEPRINTS", "50000000")
    with pytest.raises(ConfigurationError, match="DRAFTREE_BLUEPRINTS is '50000000': set it to 0"):
        Store()


def test_clearing_removes_all_records() -> None:
    for name in "ab":
        Store().put(name, MADE_FOR, "x")
    assert Store().clear() == 2
    assert (Store().entries(), Store().clear()) == ([], 0)


def test_a_record_is_whole_while_others_write_it() -> None:
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


def test_parts_of_interrupted_processes_are_cleared() -> None:
    Store().put("a", MADE_FOR, "x")
    (Store().folder / "x.part").write_text("half")
    assert Store().clear() == 1
    assert list(Store().folder.iterdir()) == []
