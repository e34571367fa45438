"""Streamed weights: budgets, the order of reads, checksums and damaged files."""

from __future__ import annotations

import shutil
import threading
import zlib
from pathlib import Path

import pytest
import torch

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.core.host import parse_size
from draftree.models.native.streaming.model import place, readable
from draftree.models.native.streaming.store import Extent, LayerReader, WeightFile

SIZE = 4096


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("8GB", 8 * 10**9), ("1.5 GiB", 3 << 29), ("600mb", 600 * 10**6), ("2KiB", 2048), (77, 77)],
)
def test_sizes_are_read(text: str | int, wanted: int) -> None:
    assert parse_size(text) == wanted


@pytest.mark.parametrize("text", ["", "8", "GB", "-1GB", "8XB", "0GB", 0, -5, True])
def test_other_sizes_are_refused(text: str | int) -> None:
    with pytest.raises(ConfigurationError, match="offload is"):
        parse_size(text)


def test_a_budget_that_holds_all_streams_nothing() -> None:
    placed = place([10, 10, 10], fixed=5, budget=35)
    assert placed.streamed == ()
    assert placed.memory == 35


def test_resident_layers_lie_evenly_among_streamed_ones() -> None:
    placed = place([10] * 9, fixed=5, budget=5 + 20 + 30)
    assert placed.resident == (0, 3, 6)
    assert placed.streamed == (1, 2, 4, 5, 7, 8)
    assert placed.num_buffers == 2
    assert placed.memory == 55


@pytest.mark.parametrize("budget", range(25, 96, 7))
def test_the_budget_is_kept(budget: int) -> None:
    placed = place([10] * 9, fixed=5, budget=budget)
    assert placed.memory <= budget
    assert sorted(placed.resident + placed.streamed) == list(range(9))


def test_a_budget_below_two_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"need 25 bytes"):
        place([10] * 9, fixed=5, budget=24)


def test_sizes_are_rounded_up() -> None:
    assert readable(2_001_000_000) == "2.01GB"
    assert readable(999) == "1KB"


def layers(path: Path, count: int) -> list[Extent]:
    """Write layers of one page whose bytes are their number, and return their places."""
    pages = [bytes([index]) * SIZE for index in range(count)]
    path.write_bytes(b"".join(pages))
    return [Extent(index * SIZE, SIZE, zlib.crc32(page)) for index, page in enumerate(pages)]


def reader(path: Path, count: int, buffers: int = 2) -> tuple[LayerReader, WeightFile]:
    extents = layers(path, count)
    file = WeightFile(path)
    return LayerReader(file, extents, buffers), file


@pytest.mark.parametrize("jumps", [[0, 1, 0, 1, 0], [3, 1, 4, 1, 2, 0], [4, 4, 4]])
def test_layers_out_of_order_are_read(tmp_path: Path, jumps: list[int]) -> None:
    ours, _ = reader(tmp_path / "weights", 5)
    for index in jumps:
        assert set(ours.take(index).tolist()) == {index}
        ours.release(index)
    ours.close()


def test_a_layer_in_use_is_not_overwritten(tmp_path: Path) -> None:
    ours, _ = reader(tmp_path / "weights", 5)
    held = ours.take(0)
    for index in (1, 2, 3, 4):
        assert set(ours.take(index).tolist()) == {index}
        ours.release(index)
    assert set(held.tolist()) == {0}
    ours.release(0)
    ours.close()


def test_closing_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    ours, _ = reader(tmp_path / "weights", 3)
    ours.take(0)
    assert threading.active_count() == before + 1
    ours.close()
    assert threading.active_count() == before


def test_damaged_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    extents = layers(path, 3)
    raw = bytearray(path.read_bytes())
    raw[2 * SIZE + 7] ^= 1
    path.write_bytes(raw)
    ours = LayerReader(WeightFile(path), extents, 1)
    for index in (0, 1):
        ours.take(index)
        ours.release(index)
    with pytest.raises(ModelLoadError, match="damaged"):
        ours.take(2)
    with pytest.raises(ModelLoadError, match="damaged"):
        ours.take(0)
    ours.close()


def test_a_shortened_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    extents = layers(path, 3)
    path.write_bytes(path.read_bytes()[: 2 * SIZE])
    ours = LayerReader(WeightFile(path), extents, 2)
    ours.take(0)
    ours.take(1)
    ours.release(0)
    with pytest.raises(ModelLoadError, match="ends early"):
        ours.take(2)
    ours.close()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be opened"):
        WeightFile(tmp_path / "nothing")


@pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")
def test_a_store_with_another_format_or_size_is_refused(tmp_path: Path) -> None:
    from draftree.models.native.streaming.store import DESCRIPTION, WEIGHTS, open_store
    from streamed import streamed

    streamed("llama", tmp_path / "model")
    described = (tmp_path / "model" / DESCRIPTION).read_text("utf-8")
    (tmp_path / "model" / DESCRIPTION).write_text(described.replace('"format": ', '"format": -'), "utf-8")
    with pytest.raises(ModelLoadError, match="format"):
        open_store(tmp_path / "model")
    (tmp_path / "model" / DESCRIPTION).write_text(described, "utf-8")
    with open(tmp_path / "model" / WEIGHTS, "ab") as file:
        file.write(b"more")
    with pytest.raises(ModelLoadError, match="bytes, expected"):
        open_store(tmp_path / "model")


@pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "gemma3_text"])
def test_unpacked_weights_are_those_that_were_packed(family: str, kind: str) -> None:
    from draftree.models.native.describe import plan_lowering
    from draftree.models.native.model import NativeModel, UnpackedWeights
    from draftree.models.native.weights import ModelWeights
    from draftree.models.torch.hf import HFModel
    from families import fresh
    from native_samples import DTYPES, FAMILIES, SIZES

    model = HFModel(fresh(family, dtype=DTYPES[kind], **(SIZES | FAMILIES[family])))
    originals = {name: tensor.detach().clone() for name, tensor in model.model.named_parameters()}
    plan = plan_lowering(model)
    ours = NativeModel(plan, ModelWeights(model.model))
    unpacked = UnpackedWeights(plan, ours.decoder)
    for name in plan.names:
        found = unpacked.get(name)
        assert torch.equal(found.to(originals[name].dtype), originals[name]), name
        unpacked.release(name)
