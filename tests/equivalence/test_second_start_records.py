"""Records of starts are used only while they are undamaged and valid."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftree.cli import models
from draftree.core.errors import ModelLoadError
from draftree.loading import load as loading
from draftree.loading.load import load_model
from draftree.loading.warm_start import native_start as load_start
from second_starts import OPTIONS, logits

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler"),
    pytest.mark.usefixtures("store"),
]


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def other_settings(folder: Path) -> None:
    """Another content of the same size, at the same time."""
    path = folder / "config.json"
    status = path.stat()
    text = path.read_text()
    assert '"rms_norm_eps": 1e-06' in text
    path.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-01'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def one_more_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')


@pytest.mark.parametrize("change", [touch, other_settings, one_more_file])
def test_a_folder_that_changed_is_read_anew(folder: Path, change: Any, reads: list[Path]) -> None:
    load_model(folder, dtype="float32")
    change(folder)
    found = load_model(folder, dtype="float32")
    assert len(reads) == 2
    wanted = load_model(folder, dtype="float32", kernels="torch")
    assert torch.allclose(logits(found), logits(wanted), atol=1e-3)
    assert found.eos_ids == wanted.eos_ids
    load_model(folder, dtype="float32")
    assert len(reads) == 3


def test_other_options_are_another_start(folder: Path, reads: list[Path]) -> None:
    for options in OPTIONS.values():
        load_model(folder, **options)
    assert len(reads) == len(OPTIONS)


@pytest.mark.parametrize("name", ["version", "__version__", "built_library"])
def test_other_versions_are_another_start(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    load_model(folder)
    other: Any = {"version": lambda _: "0", "__version__": "0", "built_library": lambda: Path("other.so")}[name]
    monkeypatch.setattr(load_start, name, other)
    load_model(folder)
    assert len(reads) == 2


def test_weights_changed_with_equal_times_are_detected(
    folder: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    load_model(folder, dtype="float32")
    path = folder / "model.safetensors"
    status, weights = path.stat(), load_file(path)
    weights["model.layers.3.mlp.down_proj.weight"][5, 5] += 1
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="is damaged: its content differs from the stored one"):
            load_model(folder, dtype="float32")
    assert "gives different logits now" in caplog.text
    assert len(reads) == 1
    os.utime(path)  # an intended change
    found = load_model(folder, dtype="float32")
    assert torch.allclose(logits(found), logits(load_model(folder, dtype="float32", kernels="torch")), atol=1e-3)


def test_a_record_of_the_wrong_weights_is_detected(
    folder: Path, store: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = loading.places_in_files

    def swapped(*given: Any) -> Any:
        found = places(*given)
        first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
        return found | {first: found[second], second: found[first]}

    monkeypatch.setattr(loading, "places_in_files", swapped)
    first, second = (load_model(folder, dtype="float32") for _ in range(2))
    assert len(reads) == 2
    assert torch.equal(logits(first), logits(second))


def test_records_are_listed_and_removed(folder: Path, reads: list[Path]) -> None:
    load_model(folder, quantization="int8")
    main, runner = typer.Typer(), CliRunner()
    main.add_typer(models.app, name="models")
    main.callback()(lambda: None)
    shown = json.loads(runner.invoke(main, ["models", "cache", "--json"]).stdout)
    assert [(one["folder"], one["quantization"]) for one in shown["kept"]] == [(str(folder.resolve()), "int8")]
    lines = runner.invoke(main, ["models", "cache"]).stdout
    assert "int8" in lines
    assert "DRAFTREE_BLUEPRINTS" in lines
    assert runner.invoke(main, ["models", "cache", "--clear"]).exit_code == 0
    assert json.loads(runner.invoke(main, ["models", "cache", "--json"]).stdout)["kept"] == []
    load_model(folder, quantization="int8")
    assert len(reads) == 2


DAMAGES: dict[str, Any] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "one bit": lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
    "garbage": lambda content: os.urandom(3000),
    "something else": lambda content: b"\n{}",
    "another record": lambda content: hashlib.sha256(b"{}").hexdigest().encode() + b"\n{}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_replaced(folder: Path, store: Path, damage: str, reads: list[Path]) -> None:
    wanted = logits(load_model(folder))
    (record,) = store.glob("*.json")
    record.write_bytes(DAMAGES[damage](record.read_bytes()))
    assert torch.equal(logits(load_model(folder)), wanted)
    assert len(reads) == 2
    load_model(folder)
    assert len(reads) == 2


def test_damaged_weights_are_refused_as_ever(folder: Path) -> None:
    load_model(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError):
        load_model(folder)


def test_a_folder_that_cannot_be_written_changes_nothing(folder: Path, store: Path, reads: list[Path]) -> None:
    store.write_text("a file where the folder should be")
    assert torch.equal(*(logits(load_model(folder)) for _ in range(2)))
    assert len(reads) == 2


def test_nothing_is_recorded_if_recording_is_off(
    folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    monkeypatch.setenv("DRAFTREE_BLUEPRINTS", "0")
    for _ in range(2):
        load_model(folder)
    assert len(reads) == 2
    assert not store.exists()
