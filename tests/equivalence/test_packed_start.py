"""Second starts of GGUF files: packed weights from the cache, and what happens if they are gone, damaged or off."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from block_files import written
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.loading import block_start, packed_start
from draftree.loading.load import load_model
from draftree.models.native import library_files, packed
from draftree.models.native.library_files import PACKING
from native_samples import in_c
from second_starts import logits

pytestmark = [in_c, pytest.mark.usefixtures("store")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path, kind="Q4_0", others={"ffn_down": "Q8_0"})


def ended() -> int:
    """Number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no start after this one pack weights."""
    monkeypatch.setattr(block_start, "_first_start", lambda *_, **__: pytest.fail("the structure is recorded"))
    monkeypatch.setattr(packed.PackedWeights, "_linear", lambda *_, **__: pytest.fail("the weights are packed"))


def test_a_second_start_reads_packed_weights(path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(path)
    ((folder, size),) = packed_start.packed_folders()
    assert folder.parent == store.parent / "packed"
    assert abs(size - first.model.footprint.weights) < 128 << 10
    refuse(monkeypatch)
    second = load_model(path)
    assert torch.equal(logits(first), logits(second))
    assert first.model.footprint == second.model.footprint
    assert (first.model.self_check, first.eos_ids) == (second.model.self_check, second.eos_ids)


def test_each_dtype_of_keys_has_a_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [logits(load_model(path, dtype=dtype)) for dtype in ("float32", "bfloat16")]
    assert len(packed_start.packed_folders()) == 2
    refuse(monkeypatch)
    assert torch.equal(logits(load_model(path, dtype="bfloat16")), found[1])


def test_a_copy_that_is_gone_or_damaged_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(load_model(path))
    ((folder, _),) = packed_start.packed_folders()
    shutil.rmtree(folder)
    assert torch.equal(logits(load_model(path)), first)
    weights = folder / "weights.bin"
    damaged = bytearray(weights.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    weights.write_bytes(damaged)
    with caplog.at_level(logging.INFO, logger="draftree"):
        assert torch.equal(logits(load_model(path)), first)
    assert "is damaged" in caplog.text
    refuse(monkeypatch)
    assert torch.equal(logits(load_model(path)), first)


def test_an_unfinished_copy_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as interrupted:
        interrupted.setattr(packed_start, "add_facts", lambda *_: None)
        first = logits(load_model(path))
    made: list[Any] = []
    pack = packed_start.write_store
    monkeypatch.setattr(packed_start, "write_store", lambda *a, **k: made.append(a) or pack(*a, **k))
    assert torch.equal(logits(load_model(path)), first)
    assert len(made) == 1


def test_what_a_killed_process_left_is_removed(path: Path, store: Path) -> None:
    left = [
        store.parent / "packed" / f"{PACKING}-{library_files._host()}-{process}-x" for process in (ended(), os.getpid())
    ]
    for one in left:
        one.mkdir(parents=True)
        (one / "weights.bin").write_bytes(bytes(1000))
    load_model(path)
    assert [one.exists() for one in left] == [False, True]
    assert len(packed_start.packed_folders()) == 1


def test_without_copies_every_start_packs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packed_start.SWITCH, "0")
    first = logits(load_model(path))
    assert packed_start.packed_folders() == []
    assert torch.equal(logits(load_model(path)), first)
    monkeypatch.setenv(packed_start.SWITCH, "yes")
    with pytest.raises(ConfigurationError, match="DRAFTREE_PACKED is 'yes'"):
        load_model(path)


def test_a_full_disk_costs_only_the_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_start, "write_store", full)
    load_model(path)
    assert "No space left on device" in caplog.text
    assert packed_start.packed_folders() == []


def test_commands_list_and_remove_copies(
    path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = load_model(path).folder
    assert folder is not None
    ((copy, size),) = packed_start.packed_folders()
    assert run(["models", "cache"]) == 0
    assert f"{size:,}" in capsys.readouterr().out
    assert run(["models", "cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packed"] == [{"folder": str(copy), "bytes": size}]
    assert run(["models", "cache", "--clear"]) == 0
    assert "1 copies of packed weights" in capsys.readouterr().err
    assert packed_start.packed_folders() == []
    load_model(path)
    assert run(["models", "remove", folder.name]) == 0
    assert packed_start.packed_folders() == []
