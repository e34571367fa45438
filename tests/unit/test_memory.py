from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftree.models import memory
from draftree.models.memory import NOTHING, Footprint, estimate_memory, free_memory
from draftree.models.table import TableLM, hashed
from families import CONTEXT, VOCAB_SIZE, target

TARGET = Footprint(weights=1000, token=10, logits=100, row=4)
DRAFT = Footprint(weights=200, token=1, logits=100, row=2)


def test_slots_are_what_is_left_behind_the_widest_pass_and_a_tenth() -> None:
    found = estimate_memory(TARGET, free_bytes=100_000, length=50)
    assert found.slot_bytes == 50 * 10 + 2 * 100 + 4
    assert found.once_bytes == 512 * 4
    assert found.kept_bytes == 10_000
    assert found.num_slots == (100_000 - 10_000 - 2048) // 704


def test_a_tree_takes_places_and_logits_and_a_drafter_keys_of_its_own() -> None:
    found = estimate_memory(TARGET, DRAFT, free_bytes=100_000, length=50, nodes=7)
    assert found.slot_bytes == 57 * 11 + 8 * (2 * 100 + 4) + 2 * 100 + 2


def test_where_nothing_fits_there_are_no_slots() -> None:
    assert estimate_memory(TARGET, free_bytes=2000, length=50).num_slots == 0
    assert estimate_memory(NOTHING, free_bytes=2000, length=50).num_slots == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_say_what_they_take(name: str) -> None:
    model = target(name)
    heads = 2 if name == "llama" else 4
    assert model.footprint.token == 2 * 2 * heads * 8 * 4, "two layers of keys and values of eight float32 a head"
    assert model.footprint.logits == VOCAB_SIZE * 4
    assert model.footprint.weights >= 2 * VOCAB_SIZE * 32
    assert model.footprint.row > 0
    assert estimate_memory(model.footprint, free_bytes=10**9, length=CONTEXT).num_slots > 100


def test_families_with_caches_of_their_own_go_by_their_settings() -> None:
    found = target("bloom").footprint
    assert found.token > 0
    assert found.weights >= VOCAB_SIZE * 32 * 4


def test_a_table_takes_next_to_nothing() -> None:
    assert TableLM(hashed(4, seed=1)).footprint == NOTHING


def test_some_memory_is_free_here() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 1 << 20


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "limit", tmp_path / "used"
    limit.write_text("5000\n")
    used.write_text("1000\n")
    monkeypatch.setattr(memory, "GROUPS", ((str(limit), str(used)),))
    assert free_memory(torch.device("cpu")) == 4000
    limit.write_text("max\n")
    assert free_memory(torch.device("cpu")) != 4000
