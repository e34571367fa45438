"""Keys and values of slots are preserved when slots are added or grown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.models.kv.slots import SPARE, KVMemory, LayerShape

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


def test_slots_that_are_added_move_none() -> None:
    memory, before = filled(2, 6)
    places = {layer: keys.data_ptr() for layer, keys in memory.keys.items()}
    version = memory.version
    memory.reserve(2 * SPARE, 6, used={0: 6, 1: 6})
    assert {layer: keys.data_ptr() for layer, keys in memory.keys.items()} == places
    assert memory.version > version
    for layer, keys in before.items():
        assert memory.keys[layer].shape[0] == 2 * SPARE
        assert torch.equal(memory.keys[layer][:2], keys)
        assert not memory.keys[layer][2:].any()


@pytest.mark.parametrize(("num_slots", "length"), [(2 * SPARE + 1, 6), (3, 9), (2, 12)])
def test_stored_keys_survive_an_exchange_of_stores(num_slots: int, length: int) -> None:
    memory, before = filled(2, 6)
    memory.reserve(num_slots, length, used={1: 5})
    for layer, keys in before.items():
        assert memory.keys[layer].shape[0] == num_slots
        assert memory.keys[layer].shape[2] == length
        assert torch.equal(memory.keys[layer][1, :, :5], keys[1, :, :5])
        assert not memory.keys[layer][0].any()


def test_a_system_that_counts_untouched_memory_gives_the_requested_size(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, before = filled(2, 6)
    zeros, asked = np.zeros, 3 * 2 * 2 * 9 * 4 * 4  # slots, layers, heads, places, dim, bytes

    def counted(size: int, dtype: type) -> np.ndarray:
        if size > asked:
            raise MemoryError
        return zeros(size, dtype=dtype)

    monkeypatch.setattr(np, "zeros", counted)
    memory.reserve(3, 9, used={0: 6})
    assert torch.equal(memory.keys[2][0, :, :6], before[2][0])
    monkeypatch.setattr(np, "zeros", lambda size, dtype: counted(10 * asked, dtype))
    with pytest.raises(MemoryError):
        memory.reserve(4, 9, used={0: 6})
    assert (memory.num_slots, memory.length) == (3, 9)
    assert torch.equal(memory.keys[2][0, :, :6], before[2][0])
