"""Keys and values of slots are preserved when slots are added or grown."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftree.models.kv import slots
from draftree.models.kv.slots import MIN_HELD, MIN_LENGTH, KVMemory, LayerShape, untouched

SHAPES = {0: LayerShape(2, 4, 4), 1: LayerShape(1, 8, 4), 2: LayerShape(2, 4, 4)}
"""Layers 0 and 2 share a store."""


def filled(num_slots: int, length: int) -> tuple[KVMemory, dict[int, Tensor]]:
    memory = KVMemory(SHAPES, dtype=torch.float32, device=torch.device("cpu"))
    memory.reserve(num_slots, length, used={})
    generator = torch.Generator().manual_seed(3)
    for layer in SHAPES:
        memory.keys[layer].copy_(torch.randn(memory.keys[layer].shape, generator=generator))
        memory.values[layer].copy_(torch.randn(memory.values[layer].shape, generator=generator))
    return memory, {layer: keys.clone() for layer, keys in memory.keys.items()}


@pytest.mark.parametrize("length", [6, MIN_LENGTH])
def test_slots_that_are_added_or_a_little_longer_move_none(length: int) -> None:
    memory, before = filled(2, 6)
    places = {layer: keys.data_ptr() for layer, keys in memory.keys.items()}
    version = memory.version
    memory.reserve(MIN_HELD, length, used={0: 6, 1: 6})
    assert {layer: keys.data_ptr() for layer, keys in memory.keys.items()} == places
    assert memory.version > version
    for layer, keys in before.items():
        assert memory.keys[layer].shape[0] == MIN_HELD
        assert torch.equal(memory.keys[layer][:2], keys)
        assert not memory.keys[layer][2:].any()


@pytest.mark.parametrize(("num_slots", "length"), [(MIN_HELD + 1, 6), (3, MIN_LENGTH + 1), (2, MIN_LENGTH + 1)])
def test_stored_keys_survive_an_exchange_of_stores(num_slots: int, length: int) -> None:
    memory, before = filled(2, 6)
    memory.reserve(num_slots, length, used={1: 5})
    for layer, keys in before.items():
        assert memory.keys[layer].shape[0] == num_slots
        assert memory.keys[layer].shape[2] >= length
        assert torch.equal(memory.keys[layer][1, :, :5], keys[1, :, :5])
        assert not memory.keys[layer][0].any()


def test_slots_that_passes_read_to_their_end_are_as_long_as_requested() -> None:
    memory = KVMemory(SHAPES, dtype=torch.float32, device=torch.device("cpu"), num_scratch=1)
    memory.reserve(2, 6, used={})
    assert (memory.length, memory.keys[0].shape[2]) == (6, 7)


def test_a_system_that_counts_untouched_memory_gives_the_requested_size(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, before = filled(2, 6)
    length = MIN_LENGTH + 9
    asked = 3 * 2 * 2 * length * 4 * 4  # slots, layers, heads, places, dim, bytes
    limit = asked

    def counted(num_bytes: int) -> Tensor:
        if num_bytes > limit:
            raise MemoryError
        return untouched(num_bytes)

    monkeypatch.setattr(slots, "untouched", counted)
    memory.reserve(3, length, used={0: 6})
    assert torch.equal(memory.keys[2][0, :, :6], before[2][0, :, :6])
    limit = asked // 10
    with pytest.raises(MemoryError):
        memory.reserve(4, length + 1, used={0: 6})
    assert (memory.num_slots, memory.length) == (3, length)
    assert torch.equal(memory.keys[2][0, :, :6], before[2][0, :, :6])


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="the system has pages of one size")
def test_the_first_tokens_of_a_slot_take_little_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * mmap.PAGESIZE

    memory = KVMemory({0: LayerShape(64, 128, 128)}, dtype=torch.float32, device=torch.device("cpu"))
    memory.reserve(3, MIN_LENGTH, used={})
    memory.copy(0, 1, 8)
    before = resident()
    memory.copy(0, 2, 8)
    assert resident() - before < MIN_LENGTH * memory.token_bytes // 8
