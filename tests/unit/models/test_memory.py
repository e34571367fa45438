from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftree.engine.memory import estimate_slots, slot_budget
from draftree.engine.parts import EngineParts
from draftree.models import memory
from draftree.models.memory import NOTHING, Footprint, free_memory
from draftree.models.table import TableLM, hashed
from families import VOCAB_SIZE, target

TARGET = Footprint(weights=1000, token=10, logits=100, row=4)
DRAFT = Footprint(weights=200, token=1, logits=100, row=2)


class Sized:
    """A model, or a drafter, of a footprint."""

    device = torch.device("cpu")

    def __init__(self, footprint: Footprint) -> None:
        self.footprint = footprint


def parts(target: Footprint, draft: Footprint | None = None, *, nodes: int = 0) -> EngineParts:
    choice = SimpleNamespace(drafter=Sized(draft or NOTHING), planner=SimpleNamespace(default_nodes=nodes))
    return EngineParts(Sized(target), None, {} if draft is None else {"own": choice})  # type: ignore[arg-type,dict-item]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("draftree.engine.memory.free_memory", lambda device: 100_000)
    return 100_000


def test_slots_share_half_of_what_is_free(free: int) -> None:
    found = estimate_slots(parts(TARGET), 50)
    assert found.slot_bytes == (50 + 64) * 10 + 2 * 100 + 4
    assert (found.free_bytes, found.sequence_bytes) == (free, free // 2)
    assert found.num_slots == 50_000 // found.slot_bytes


def test_a_tree_takes_places_and_logits_and_a_drafter_keys_of_its_own(free: int) -> None:
    found = estimate_slots(parts(TARGET, DRAFT, nodes=7), 50)
    assert found.slot_bytes == (50 + 64) * 11 + 8 * (2 * 100 + 4) + 2 * 100 + 2
    assert estimate_slots(parts(TARGET, DRAFT, nodes=100), 50).slot_bytes == 150 * 11 + 101 * 204 + 202


def test_memory_of_graphs_is_subtracted_first(free: int) -> None:
    target, draft = (dataclasses.replace(one, graphs=10_000) for one in (TARGET, DRAFT))
    found = estimate_slots(parts(target, draft, nodes=7), 50)
    assert (found.graph_bytes, found.sequence_bytes) == (20_000, 40_000)
    assert slot_budget(parts(target, draft, nodes=7)).sequence_bytes == 40_000
    assert slot_budget(parts(dataclasses.replace(TARGET, graphs=10**9))).sequence_bytes == 0


def test_the_longest_text_is_the_longest_of_which_one_slot_fits(free: int) -> None:
    budget = slot_budget(parts(TARGET, DRAFT, nodes=7))
    assert budget.longest is not None
    assert budget.num_slots(budget.longest) == 1
    assert budget.num_slots(budget.longest + 1) == 0


def test_there_are_no_slots_if_none_fits(free: int) -> None:
    assert estimate_slots(parts(TARGET), 10_000).num_slots == 0


def test_models_report_their_footprint() -> None:
    for name, heads in (("llama", 2), ("gpt2", 4)):
        footprint = target(name).footprint
        assert footprint.token == 2 * 2 * heads * 8 * 4, "two layers of keys and values of eight float32 a head"
        assert footprint.logits == VOCAB_SIZE * 4
        assert footprint.weights >= 2 * VOCAB_SIZE * 32
        assert footprint.row > 0
        assert footprint.graphs == 0
    with_own_cache = target("bloom").footprint
    assert with_own_cache.token > 0
    assert with_own_cache.weights >= VOCAB_SIZE * 32 * 4
    assert TableLM(hashed(4, seed=1)).footprint == NOTHING


def test_free_memory_is_what_the_system_and_the_container_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 1 << 20
    limit, used = tmp_path / "limit", tmp_path / "used"
    limit.write_text("5000\n")
    used.write_text("1000\n")
    monkeypatch.setattr(memory, "GROUPS", ((str(limit), str(used)),))
    assert free_memory(torch.device("cpu")) == 4000
    limit.write_text("max\n")
    assert free_memory(torch.device("cpu")) != 4000
