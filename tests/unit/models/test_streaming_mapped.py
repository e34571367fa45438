"""Mapped layers: the same bits before, while and after they are copied, damaged files, and models that are dropped."""

from __future__ import annotations

import gc
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree.core.errors import ModelLoadError
from draftree.models.native.describe import plan_lowering
from draftree.models.native.library import library
from draftree.models.native.model import NativeModel
from draftree.models.native.streaming import model as streaming
from draftree.models.native.streaming.model import StreamedWeights, copy_in_background, resident_model
from draftree.models.native.streaming.store import WeightStore, open_store, write_store
from draftree.models.native.weights import ModelWeights
from draftree.models.torch.hf import HFModel
from families import fresh
from native_samples import DTYPES, lowered, text
from slot_samples import at_once
from streamed import LAYERS, sizes

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

Copies = list[tuple[Any, int]]


def target() -> HFModel:
    return HFModel(fresh("llama", dtype=DTYPES["int4"], **sizes("llama")))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Map files of any size; threads that would copy are recorded and not started."""
    found: Copies = []
    monkeypatch.setattr(streaming, "LEAST_MAPPED", 0)
    monkeypatch.setattr(streaming, "PASSES_BEFORE_COPY", 1)
    monkeypatch.setattr(streaming, "copy_in_background", lambda *given: found.append(given))
    return found


@pytest.fixture
def blueprint() -> Any:
    return plan_lowering(target())


@pytest.fixture
def store(tmp_path: Path, blueprint: Any) -> WeightStore:
    return write_store(tmp_path, library(), blueprint, ModelWeights(target().model), quantization="int4")


def resident(blueprint: Any, store: WeightStore) -> NativeModel:
    return resident_model(blueprint, store, quantization="int4")


def test_a_settled_model_has_copied_its_layers(
    blueprint: Any, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LEAST_MAPPED", 0)
    model = resident(blueprint, store)
    copied: list[int] = []
    copy = StreamedWeights.copy_layer
    monkeypatch.setattr(
        StreamedWeights, "copy_layer", lambda packed, layer: copied.append(layer) or copy(packed, layer)
    )
    model.settle()
    assert copied == list(range(LAYERS))
    wanted = at_once(lowered("llama", "int4", **sizes("llama")), text(70))
    for _ in range(streaming.PASSES_BEFORE_COPY + 1):
        assert torch.equal(at_once(model, text(70)), wanted)
    model.settle()
    assert copied == list(range(LAYERS)), "layers are copied once"


def test_passes_have_the_same_bits_before_while_and_after_layers_are_copied(
    blueprint: Any, store: WeightStore, copies: Copies
) -> None:
    model, wanted = resident(blueprint, store), at_once(lowered("llama", "int4", **sizes("llama")), text(70))
    assert torch.equal(at_once(model, text(70)), wanted)
    ((packed, count),) = copies
    assert count == LAYERS
    before = packed.layers[0].qkv.weight
    for layer in range(count):
        packed.copy_layer(layer)
        assert torch.equal(at_once(model, text(70)), wanted)
    assert packed.layers[0].qkv.weight != before


def test_a_thread_copies_all_layers_and_closes_the_file(blueprint: Any, store: WeightStore, copies: Copies) -> None:
    model = resident(blueprint, store)
    wanted = at_once(model, text(20)).clone()
    ((packed, count),) = copies
    before = [layer.down.weight for layer in packed.layers]
    copy_in_background(packed, count).join()
    assert all(new.down.weight != old for new, old in zip(packed.layers, before, strict=True))
    with pytest.raises(ModelLoadError):
        packed.copy_layer(0)  # the file is closed
    assert torch.equal(at_once(model, text(20)), wanted)
    assert len(copies) == 1


def test_layers_that_cannot_be_copied_stay_mapped(
    blueprint: Any,
    store: WeightStore,
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = resident(blueprint, store)
    wanted = at_once(model, text(20)).clone()
    ((packed, count),) = copies

    def full(*_: Any) -> None:
        raise MemoryError("no pages")

    monkeypatch.setattr(StreamedWeights, "_read", full)
    with caplog.at_level(logging.INFO, logger="draftree"):
        copy_in_background(packed, count).join()
    assert "stay mapped" in caplog.text
    assert torch.equal(at_once(model, text(20)), wanted)


def test_a_damaged_layer_is_refused_before_any_pass(blueprint: Any, store: WeightStore, copies: Copies) -> None:
    raw = bytearray(store.file.read_bytes())
    raw[store.extents[LAYERS - 1].start + 5] ^= 1
    store.file.write_bytes(raw)
    with pytest.raises(ModelLoadError, match="is damaged"):
        resident(blueprint, open_store(store.folder))
    assert copies == []


def test_the_thread_ends_with_its_model(blueprint: Any, store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started, wait = list[threading.Thread](), threading.Event()
    read = StreamedWeights._read
    monkeypatch.setattr(streaming, "LEAST_MAPPED", 0)
    monkeypatch.setattr(streaming, "PASSES_BEFORE_COPY", 1)

    def kept(*given: Any) -> None:
        monkeypatch.setattr(StreamedWeights, "_read", lambda *given: wait.wait() and read(*given))
        started.append(copy_in_background(*given))

    monkeypatch.setattr(streaming, "copy_in_background", kept)
    model = resident(blueprint, store)
    at_once(model, text(20))
    del model
    gc.collect()
    wait.set()
    started[0].join()
    assert not started[0].is_alive()


def test_small_files_are_read_at_once(blueprint: Any, store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.num_bytes < streaming.LEAST_MAPPED
    monkeypatch.setattr(streaming, "MappedFile", lambda *_: pytest.fail("it is mapped"))
    resident(blueprint, store)


def test_the_end_of_the_process_ends_copies(
    blueprint: Any, store: WeightStore, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resident(blueprint, store)
    at_once(model, text(20))
    ((packed, count),) = copies
    before, read = packed.layers[1].qkv.weight, StreamedWeights._read
    ending = threading.Event()
    monkeypatch.setattr(streaming, "_ending", ending)
    monkeypatch.setattr(StreamedWeights, "_read", lambda *given: ending.wait() and read(*given))
    thread = copy_in_background(packed, count)
    streaming._end_threads()
    assert not thread.is_alive()
    assert packed.layers[1].qkv.weight == before
