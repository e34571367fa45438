"""`draftree drafters`: the list for a model, offline, as text and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftree.cli.main import run
from draftree.loading.auto_draft import TunedDraft, keep_tuned
from families import drafter_folder
from private_cache import private_cache
from target_heads import TARGET, head_folder


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.setenv("DRAFTREE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_model_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drafters", "Qwen/Qwen3-8B"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Qwen/Qwen3-8B: 11 drafters, 0 here; it is not on this machine\n")
    assert "\nz-lab/Qwen3-8B-DFlash-b16\n  dflash, MIT, not here\n  of a kind that is read\n" in out
    assert "does not fit" not in out
    assert out.endswith("\n--download-drafter would fetch z-lab/Qwen3-8B-DFlash-b16 (dflash, MIT)\n")


def test_kinds_without_a_reader_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drafters", "Qwen/Qwen3.8-27B"]) == 0
    assert "does not fit: heads of kind 'jetspec++' are not read" in capsys.readouterr().out


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drafters", "no-one/nothing"]) == 0
    assert capsys.readouterr().out == "no-one/nothing: no drafter is known; it is not on this machine\n"
    assert run(["drafters", "/no/such/folder"]) == 1
    assert "there is no model '/no/such/folder'" in capsys.readouterr().err


def test_what_is_here_and_what_it_gained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = drafter_folder("llama", tmp_path / "models", distance=0.0, **TARGET)
    head = shutil.copytree(head_folder(tmp_path / "heads"), model.parent / "head")
    spread = (1.1, 1.4)
    kept = TunedDraft(
        model=str(model), fingerprint="f", draft="ngram", plan=None, speedup=1.23, spread=spread, texts=8,
        prompts="mine.jsonl", temperatures=(0.0,), conditions={}, date="2026-11-27",
    )  # fmt: skip
    keep_tuned(kept)
    assert run(["drafters", str(model)]) == 0
    out = capsys.readouterr().out
    assert f"{model}: 1 drafter, 1 here; in {model}\n" in out
    assert "measured here: ngram, 1.23 times plain decoding in the median of 8 texts of mine.jsonl" in out
    assert "(quartiles 1.10–1.40), 2026-11-27" in out
    assert f"\n{head}\n  eagle3, beside the model\n  fits\n" in out
    assert run(["drafters", str(model), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["shape"] == {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 96,
    }  # fmt: skip
    assert [each["draft"] for each in values["measured"]] == ["ngram"]
    (drafter,) = values["drafters"]
    assert (drafter["kind"], drafter["place"], drafter["fits"]) == ("eagle3", str(head), True)


def test_the_head_of_the_package_is_listed_with_its_gain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drafters", "smollm2-135m-instruct"]) == 0
    out = capsys.readouterr().out
    assert "eagle3, 10 MB, Apache-2.0, in this package" in out
    assert "1.63 times plain decoding: median of 16 chat prompts" in out


def test_a_wrong_list_of_the_user_is_reported_after_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "config" / "drafters" / "mine.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"format": 1,\n}')
    assert run(["drafters", "Qwen/Qwen3-8B"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("Qwen/Qwen3-8B: 11 drafters")
    assert str(place) in captured.err
    assert "line 2" in captured.err
