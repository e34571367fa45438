"""`draftree models`, `doctor` and `verify-server` with GGUF files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from block_files import written
from draftree.cli.main import run
from draftree.core.errors import UnsupportedModelError
from draftree.loading.first_layers import load_first_layers, require_split
from draftree.loading.resolve import prepared_folder
from draftree.options import ModelOptions
from private_cache import private_cache


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the models in an empty cache."""
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def in_blocks(tmp_path: Path) -> Path:
    """A file that runs on its own blocks."""
    return written(tmp_path, kind="Q4_0", others={"ffn_down": "Q8_0"})


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A file that has to be converted."""
    return written(tmp_path, kind="Q8_0", others={"ffn_down": "BF16"})


def weights_in(models: Path) -> list[Path]:
    return list(models.glob("*/*.safetensors"))


def test_the_path_of_a_file_is_the_folder_that_models_use(
    in_blocks: Path, models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "path", str(in_blocks)]) == 0
    assert capfd.readouterr().out == f"{prepared_folder(str(in_blocks))}\n"
    assert not weights_in(models)


def test_the_path_of_another_file_is_known_after_its_conversion(
    other: Path, models: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(["models", "path", str(other)]) == 1
    said = capfd.readouterr().err
    assert "native kernels do not read matrices of kind BF16" in said
    assert f"run 'draftree models get {other}'" in said
    assert not weights_in(models)
    assert run(["models", "get", str(other)]) == 0
    folder = capfd.readouterr().out
    assert len([record for record in caplog.records if "is converted once" in record.getMessage()]) == 1
    for action in ("get", "path"):
        assert run(["models", action, str(other)]) == 0
        assert capfd.readouterr().out == folder
    assert len([record for record in caplog.records if "is converted once" in record.getMessage()]) == 1


def test_a_checked_file_is_read_not_converted(in_blocks: Path, models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in ("readable; no checksums are recorded for it", "intact"):
        assert run(["models", "check", str(in_blocks)]) == 0
        assert capfd.readouterr().out == f"{in_blocks}: {words}\n"
    assert not models.exists()
    folder = prepared_folder(str(in_blocks))
    assert run(["models", "check", "all"]) == 0
    assert f"{folder.name}: intact" in capfd.readouterr().out


def test_a_file_that_was_damaged_unnoticed_is_found(
    in_blocks: Path, models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepared_folder(str(in_blocks))
    before, content = in_blocks.stat(), bytearray(in_blocks.read_bytes())
    content[-1] ^= 1
    in_blocks.write_bytes(content)
    os.utime(in_blocks, ns=(before.st_atime_ns, before.st_mtime_ns))
    (note,) = (models.parent / "fingerprints").glob("*.json")  # a damaged disk changes no time of the file
    note.write_text(json.dumps(json.loads(note.read_text("utf-8")) | {"changed_ns": in_blocks.stat().st_ctime_ns}))
    assert run(["models", "check", str(in_blocks)]) == 1
    assert f"'{in_blocks}' is damaged" in capfd.readouterr().err


def test_a_damaged_description_is_found(in_blocks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = prepared_folder(str(in_blocks))
    (folder / "config.json").write_text("{}", "utf-8")
    for name in (str(in_blocks), folder.name):
        assert run(["models", "check", name]) == 1
        assert "is damaged" in capfd.readouterr().err


@pytest.mark.parametrize("which", ["in_blocks", "other"])
def test_files_are_not_split(
    which: str, models: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    path = request.getfixturevalue(which)
    assert run(["verify-server", str(path), "--split", "1", "--port", "0"]) == 1
    assert "is a GGUF file, which is not split by layers" in capfd.readouterr().err
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        require_split(path, 1)
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        load_first_layers(ModelOptions(path, dtype="float32", device="cpu"), 1)
    assert not models.exists()


def test_the_doctor_names_the_kinds_of_blocks(in_blocks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(in_blocks), "--json"]) == 0
    model = json.loads(capfd.readouterr().out)["model"]
    kinds = {one["kind"]: one for one in model["blocks"]}
    assert list(kinds) == ["Q4_0", "Q8_0"]
    assert kinds["Q8_0"] == {
        "kind": "Q8_0",
        "num_matrices": 3,
        "num_weights": 3 * 256 * 512,
        "num_bytes": 3 * 256 * 512 * 34 // 32,
    }
    assert run(["doctor", str(in_blocks)]) == 0
    lines = capfd.readouterr().out.splitlines()
    total = kinds["Q4_0"]["num_weights"] + kinds["Q8_0"]["num_weights"]
    bits = (4.5 * kinds["Q4_0"]["num_weights"] + 8.5 * kinds["Q8_0"]["num_weights"]) / total
    (line,) = [line for line in lines if line.startswith("  blocks")]
    assert f"{bits:.2f} bits per weight: Q4_0 " in line
    assert line.endswith(f"Q8_0 {100 * kinds['Q8_0']['num_weights'] / total:.1f}% (3 matrices)")
    (line,) = [line for line in lines if line.startswith("  self-check")]
    assert line.endswith("; 0.15 is accepted")
