"""Second starts: packed weights from the cache, and what happens if they are gone, damaged, stale or off."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from block_files import written
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.loading import blocks, lowering, native_start
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.models.native import packed
from families import fresh
from native_samples import in_c
from second_starts import SIZES, logits

pytestmark = [in_c, pytest.mark.usefixtures("store")]
Load = Callable[[], LoadedModel]


FOLDERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path, kind="Q4_0", others={"ffn_down": "Q8_0"})


@pytest.fixture(params=["gguf", *FOLDERS])
def load(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Start a model whose packed weights are kept."""
    monkeypatch.setattr(native_start, "LEAST_KEPT", 0)
    if request.param == "gguf":
        return partial(load_model, written(tmp_path, kind="Q4_0", others={"ffn_down": "Q8_0"}))
    model = fresh("qwen3", **SIZES, tie_word_embeddings=request.param != "int8")
    model.save_pretrained(tmp_path / "model")
    return partial(load_model, tmp_path / "model", **FOLDERS[request.param])


def ended() -> int:
    """Number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no start after this one pack weights."""
    monkeypatch.setattr(blocks, "_first_start", lambda *_, **__: pytest.fail("the structure is recorded"))
    monkeypatch.setattr(lowering, "lower_model", lambda *_, **__: pytest.fail("the structure is recorded"))
    monkeypatch.setattr(packed.PackedWeights, "_linear", lambda *_, **__: pytest.fail("the weights are packed"))


def test_a_second_start_reads_packed_weights(load: Load, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load()
    ((folder, size),) = native_start.packed_folders()
    assert folder.parent == store.parent / "packed"
    assert abs(size - first.model.footprint.weights) < 128 << 10
    refuse(monkeypatch)
    second = load()
    assert torch.equal(logits(first), logits(second))
    assert first.model.footprint == second.model.footprint
    assert (first.model.self_check, first.eos_ids) == (second.model.self_check, second.eos_ids)


def test_each_dtype_of_keys_has_a_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [logits(load_model(path, dtype=dtype)) for dtype in ("float32", "bfloat16")]
    assert len(native_start.packed_folders()) == 2
    refuse(monkeypatch)
    assert torch.equal(logits(load_model(path, dtype="bfloat16")), found[1])


def test_a_copy_that_is_gone_or_damaged_is_made_again(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(load())
    ((folder, _),) = native_start.packed_folders()
    shutil.rmtree(folder)
    monkeypatch.setattr(lowering, "lower_model", lambda *_, **__: pytest.fail("the structure is recorded"))
    assert torch.equal(logits(load()), first)
    weights = folder / "weights.bin"
    damaged = bytearray(weights.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    weights.write_bytes(damaged)
    with caplog.at_level(logging.INFO, logger="draftree"):
        assert torch.equal(logits(load()), first)
    assert "is damaged" in caplog.text
    refuse(monkeypatch)
    assert torch.equal(logits(load()), first)


@pytest.mark.parametrize("kind", FOLDERS)
def test_files_that_changed_with_equal_sizes_and_times_are_read_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_start, "LEAST_KEPT", 0)
    fresh("qwen3", **SIZES).save_pretrained(tmp_path / "model")
    load_model(tmp_path / "model", **FOLDERS[kind])
    path = tmp_path / "model" / "model.safetensors"
    status, weights = path.stat(), load_file(path)
    weights["model.layers.3.mlp.down_proj.weight"][5, 5] += 1
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ModelLoadError, match="is damaged: its content differs from the stored one"):
        load_model(tmp_path / "model", **FOLDERS[kind])


def test_weights_that_are_renamed_while_they_are_read_are_kept_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_start, "LEAST_KEPT", 0)
    fresh("llama", **SIZES, tie_word_embeddings=True).model.save_pretrained(tmp_path / "inner")
    first = logits(load_model(tmp_path / "inner"))
    refuse(monkeypatch)
    assert torch.equal(logits(load_model(tmp_path / "inner")), first)


def test_small_models_are_not_kept(tmp_path: Path) -> None:
    fresh("qwen3", **SIZES).save_pretrained(tmp_path / "model")
    load_model(tmp_path / "model")
    assert native_start.packed_folders() == []


def test_what_a_killed_process_left_is_removed(path: Path, store: Path) -> None:
    leftover = store.parent / "work" / "packed-other.part-x"
    leftover.mkdir(parents=True)
    (leftover / "weights.bin").write_bytes(bytes(1000))
    load_model(path)
    assert not leftover.exists()
    assert len(native_start.packed_folders()) == 1


def test_without_copies_every_start_packs(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_start.SWITCH, "0")
    first = logits(load())
    assert native_start.packed_folders() == []
    assert torch.equal(logits(load()), first)
    monkeypatch.setenv(native_start.SWITCH, "yes")
    with pytest.raises(ConfigurationError, match="DRAFTREE_PACKED is 'yes'"):
        load()


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def half_full(_: Path) -> Any:
    return SimpleNamespace(free=1000)


@pytest.mark.parametrize(
    ("broken", "words"),
    [("save_store", "became full"), ("shutil.disk_usage", "of the 1000 bytes that are free")],
)
def test_a_full_disk_costs_only_the_copy(
    load: Load, broken: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"draftree.loading.native_start.{broken}", full if broken == "save_store" else half_full)
    with caplog.at_level(logging.INFO, logger="draftree"):
        first = logits(load())
    assert words in caplog.text
    assert native_start.packed_folders() == []
    assert torch.equal(logits(load()), first)


def test_a_cache_that_cannot_be_written_costs_only_the_copy(load: Load, store: Path) -> None:
    (store.parent / "packed").write_text("a file where the folder should be")
    assert torch.equal(logits(load()), logits(load()))


def test_commands_list_and_remove_copies(
    path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = load_model(path).folder
    assert folder is not None
    ((copy, size),) = native_start.packed_folders()
    assert run(["models", "cache"]) == 0
    assert f"{size:,}" in capsys.readouterr().out
    assert run(["models", "cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packed"] == [{"folder": str(copy), "bytes": size}]
    assert run(["models", "cache", "--clear"]) == 0
    assert "1 copies of packed weights" in capsys.readouterr().err
    assert native_start.packed_folders() == []
    load_model(path)
    assert run(["models", "remove", folder.name]) == 0
    assert native_start.packed_folders() == []
