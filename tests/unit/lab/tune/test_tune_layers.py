"""The search for sublayers to skip: it measures, stores, continues, and reports held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_samples import write_model
from draftree import LLM
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, ModelError
from draftree.lab.tune.layers import LayerSearch, LayerTuneSettings
from draftree.loading.layer_sets import place_of, stored_set
from draftree.loading.load import load_model
from draftree.options import ModelOptions
from private_cache import private_cache

pytest.importorskip("optuna")

NUM_PROMPTS = 5
TRIALS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"the {i} fox"}) + "\n" for i in range(NUM_PROMPTS)))
    return path


def settings(folder: Path, prompts: Path, **more: Any) -> LayerTuneSettings:
    options = ModelOptions(str(folder), kernels="torch", dtype="float32")
    return LayerTuneSettings(options, prompts, **{"trials": TRIALS, "max_tokens": 4, **more})


def fingerprint(folder: Path) -> str:
    return load_model(folder, dtype="float32", kernels="torch").model.fingerprint


def test_the_fastest_set_is_kept_and_taken(folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is made up: what leaves most out is fastest, and prompts that were not searched are slower."""
    asked: list[tuple[str | None, int]] = []

    def made_up(self: LayerSearch, spec: str | None, given: list[list[int]]) -> Iterator[float]:
        asked.append((spec, len(given)))
        for _ in given:
            yield 1.0 if spec is None else (3.0 if given == self.unseen else 1 / (1 + len(spec)))

    monkeypatch.setattr(LayerSearch, "_each_seconds", made_up)
    search = LayerSearch(settings(folder, prompts, trials=8, k=3))
    assert (len(search.seen), len(search.unseen)) == (4, 1)
    tried = list(search.run())
    assert [one.number for one in tried] == list(range(8))
    found = search.conclude()
    assert found is not None
    assert found.seconds_per_token == min(one.seconds_per_token for one in tried if one.seconds_per_token)
    assert (found.unseen_seconds_per_token, found.unseen_plain_seconds_per_token) == (3.0, 1.0)
    assert all(spec is None or (spec.startswith("layer-skip,") and spec.endswith(",k=3")) for spec, _ in asked)


def test_a_search_goes_on_where_it_was(folder: Path, prompts: Path) -> None:
    first = LayerSearch(settings(folder, prompts))
    done = first.run()
    next(done)
    next(done)
    done.close()
    again = LayerSearch(settings(folder, prompts))
    assert again.num_done == 2
    assert len(list(again.run())) == TRIALS - 2
    assert again.best is not None
    assert not list(LayerSearch(settings(folder, prompts)).run())
    other = LayerSearch(settings(folder, prompts, max_tokens=5))
    assert other.num_done == 0, "other lengths are other measurements"


def test_the_command_keeps_a_set_that_the_drafter_finds(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    timed(monkeypatch, unseen=1.5)
    line = ["tune", "layers", str(folder), "--prompts", str(prompts), "--trials", "3", "--max-tokens", "4"]
    assert run([*line, "--kernels", "torch", "--dtype", "float32"]) == 0
    shown = capfd.readouterr().out
    assert "4 searched prompts" in shown
    assert "1 unseen prompts" in shown
    found = stored_set(fingerprint(folder))
    assert found.num_trials == 3
    llm = LLM(folder, "layer-skip", dtype="float32", kernels="torch")
    assert llm.draft_note == str(found)


def timed(monkeypatch: pytest.MonkeyPatch, *, unseen: float) -> None:
    """Sets are twice as fast as plain decoding on searched prompts, and this many times on the others."""

    def made_up(self: LayerSearch, spec: str | None, given: list[list[int]]) -> Iterator[float]:
        for _ in given:
            yield 1.0 if spec is None else 1 / (unseen if given == self.unseen else 2.0)

    monkeypatch.setattr(LayerSearch, "_each_seconds", made_up)


@pytest.mark.parametrize("number", [0.45, 1.0])
def test_a_set_that_loses_is_not_stored(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, number: float
) -> None:
    timed(monkeypatch, unseen=number)
    line = ["tune", "layers", str(folder), "--prompts", str(prompts), "--trials", "3", "--max-tokens", "4"]
    assert run([*line, "--kernels", "torch", "--dtype", "float32"]) == 1
    shown = capfd.readouterr()
    assert f"not stored: the best set is {number:.2f} times as fast as plain decoding" in shown.err
    assert "stored in" not in shown.out
    assert not place_of(fingerprint(folder)).exists()


def test_a_set_that_loses_does_not_replace_one_that_wins_but_on_request(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    line = ["tune", "layers", str(folder), "--prompts", str(prompts), "--max-tokens", "4", "--kernels", "torch"]
    line += ["--dtype", "float32", "--trials"]
    timed(monkeypatch, unseen=1.5)
    assert run([*line, "2"]) == 0
    timed(monkeypatch, unseen=0.5)
    assert run([*line, "3"]) == 1
    assert stored_set(fingerprint(folder)).speedup == 1.5
    assert run([*line, "4", "--keep-anyway"]) == 0
    assert stored_set(fingerprint(folder)).speedup == 0.5


def test_stopping_keeps_the_measurements(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    tries = LayerSearch._try
    timed(monkeypatch, unseen=1.5)

    def stopping(self: LayerSearch, trial: Any) -> Any:
        if trial.number == 2:
            raise KeyboardInterrupt
        return tries(self, trial)

    monkeypatch.setattr(LayerSearch, "_try", stopping)
    line = ["tune", "layers", str(folder), "--prompts", str(prompts), "--max-tokens", "4"]
    assert run([*line, "--kernels", "torch", "--dtype", "float32"]) == 130
    shown = capfd.readouterr()
    assert "interrupted" in shown.err
    assert "not measured on unseen prompts" in shown.out
    assert stored_set(fingerprint(folder)).num_trials == 2


def test_stopping_before_the_first_set_keeps_nothing(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def stopping(self: LayerSearch, trial: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerSearch, "_try", stopping)
    assert run(["tune", "layers", str(folder), "--prompts", str(prompts), "--max-tokens", "4"]) == 130
    assert "no set was measured" in capfd.readouterr().err
    assert not place_of(fingerprint(folder)).exists()


@pytest.mark.parametrize("change", [{"trials": 0}, {"k": 0}, {"max_tokens": 1}, {"limit": 0}])
def test_settings_are_checked(folder: Path, prompts: Path, change: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"it must be at least|no speed"):
        settings(folder, prompts, **change)


def test_without_optuna_the_extra_is_named(folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigurationError, match=r"draftree\[tune\]"):
        LayerSearch(settings(folder, prompts))


def test_a_model_without_parts_is_refused(folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(self: Any, part: Any) -> None:
        raise ModelError("no parts")

    monkeypatch.setattr("draftree.models.kv.slotted.SlottedModel.require_part", refusing)
    with pytest.raises(ModelError, match="no parts"):
        LayerSearch(settings(folder, prompts))
