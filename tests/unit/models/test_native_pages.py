"""Packed weights are not held twice: pages of their files are released."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftree.loading.load import load_model
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import library
from draftree.models.native.weights import FilePages
from families import fresh

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="the system does not list what is mapped")


def resident(path: Path) -> int:
    """Resident bytes of a file in this process."""
    total, inside = 0, False
    for line in SMAPS.read_text("utf-8", errors="replace").splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_pages_of_a_file_are_released_and_can_be_read_again(tmp_path: Path) -> None:
    path, wanted = tmp_path / "a.safetensors", torch.arange(1 << 20, dtype=torch.float32)
    save_file({"a": wanted}, path)
    with safe_open(path, "pt") as file:
        weight = file.get_tensor("a")
        assert float(weight.sum()) == float(wanted.sum())
        before = resident(path)
        if before < 1 << 21:
            pytest.skip("this safetensors copies what it reads")
        assert FilePages().give_back(weight)
        assert resident(path) < before / 4
        assert torch.equal(weight, wanted)


def test_anonymous_memory_is_left_alone() -> None:
    weight = torch.ones(1 << 20)
    assert not FilePages().give_back(weight)
    assert float(weight.sum()) == 1 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_model_leaves_its_file(tmp_path: Path, dtype: str) -> None:
    try:
        library()
    except NativeUnavailableError:
        pytest.skip("no native kernels here")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}
    model = fresh("llama", dtype=getattr(torch, dtype), **sizes, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    num_bytes = (tmp_path / "model.safetensors").stat().st_size
    loaded = load_model(tmp_path, dtype=dtype, kernels="native")
    assert loaded.model.footprint.weights >= num_bytes * (0.9 if dtype == "float32" else 0.7)  # 12 of 16 bits
    assert resident(tmp_path / "model.safetensors") < num_bytes / 4
