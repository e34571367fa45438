"""Passes and edits as bytes: a replica that gets nothing else computes the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from draftree.models.base import Close, Commit, Edit, Extend, Fork, LayerSubset, Pass, Slot, Truncate
from draftree.models.process import decode, encode
from draftree.models.table import TableLM, hashed

VOCAB = 11


class Replica:
    """A model in another process: it gets bytes only."""

    def __init__(self) -> None:
        self.model = TableLM(hashed(VOCAB, seed=5), num_features=2)
        self.slots: dict[int, Slot] = {}

    def open(self) -> None:
        slot = self.model.open()
        self.slots[slot.id] = slot

    def run(self, data: bytes) -> Any:
        return self.model.run(decode(data, self.slots))

    def apply(self, data: bytes) -> None:
        edits = decode(data, self.slots)
        closed = [edit.slot.id for edit in edits if isinstance(edit, Close)]
        opened = self.model.apply(edits)
        for number in closed:
            del self.slots[number]
        self.slots |= {slot.id: slot for slot in opened}


def test_a_pass_comes_back_as_it_was() -> None:
    model = TableLM(hashed(VOCAB, seed=5))
    slots = [model.open(), model.open()]
    jobs = [Extend(slots[1], (1, 2), range(-1, 1), logits_at=range(1, 2)), Extend(slots[0], [3], [-1])]
    layers = LayerSubset(end=3, attention=frozenset({1}), mlp=frozenset({0, 2}))
    sent = Pass(jobs, layers, capture=(0, 2))
    assert decode(encode(sent), dict(enumerate(slots))) == sent


def test_a_replica_that_replays_passes_and_edits_has_the_same_slots_and_rows() -> None:
    chance = random.Random(1)
    leader, replica = TableLM(hashed(VOCAB, seed=5), num_features=2), Replica()
    slots: list[Slot] = []
    for _ in range(60):
        if len(slots) < 2:
            slots.append(leader.open())
            replica.open()
        one = Pass([grown(slot, chance) for slot in slots], capture=(1,))
        found, wanted = replica.run(encode(one)), leader.run(one)
        assert torch.equal(found.logits.tensor(), wanted.logits.tensor())
        assert torch.equal(found.hidden, wanted.hidden)
        edits = [edit_of(slot, chance) for slot in slots]
        data = encode(edits)
        slots = [e.slot for e in edits if not isinstance(e, Close)] + leader.apply(edits)
        replica.apply(data)
        assert sorted(replica.slots) == sorted(slot.id for slot in slots)
        for slot in slots:
            twin = replica.slots[slot.id]
            assert (twin.length, twin.num_tentative) == (slot.length, slot.num_tentative)


def grown(slot: Slot, chance: random.Random) -> Extend:
    start, count = slot.num_tentative, chance.randint(1, 4)
    parents = [chance.randint(-1, start + node - 1) for node in range(count)]
    return Extend(slot, [chance.randrange(VOCAB) for _ in range(count)], parents)


def test_edits_of_unknown_slots_are_refused() -> None:
    model = TableLM(hashed(VOCAB, seed=5))
    slot = model.open()
    data = encode([Commit(slot, [0, 2], [3])])
    assert decode(data, {0: slot}) == [Commit(slot, [0, 2], [3])]
    with pytest.raises(KeyError):
        decode(data, {})


def edit_of(slot: Slot, chance: random.Random) -> Edit:
    kind = chance.choice(["commit", "commit", "truncate", "fork", "close"])
    if kind == "commit":
        return Commit(slot, [])
    if kind == "truncate":
        return Truncate(slot, slot.length // 2)
    return Fork(slot, slot.length) if kind == "fork" else Close(slot)
