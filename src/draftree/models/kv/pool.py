"""The places of a model's slots: which are free, what each holds, and where what is kept comes to lie."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from draftree.core.tree import ROOT, is_path, is_rooted
from draftree.models.base import Commit, Extend, Slot
from draftree.models.kv.slots import CLOSED, KVMemory, KVSlot, LayerShape

MAX_PARTIAL = 512
"""Partial nodes that may be stored after a slot's prefix and tree."""


class Leftovers(Enum):
    """What passes do with places whose keys and values are not kept."""

    UNREAD = auto()
    """They touch what is visible only."""
    MASKED = auto()
    """They read it with weight zero: what is not finite must not stay in a slot that is used again."""
    CLEARED = auto()
    """As masked, but without waiting for the device: it becomes zero as soon as it is dropped."""


class SlotPool:
    """Slots of one model, in one memory. Mutated by its model only.

    Args:
        shapes: of keys and values, by the index of the layer.
        dtype: of keys and values.
        device: where they lie.
        leftovers: what passes do with places that are not kept.
        granule: lengths are rounded up to a multiple of it.
        num_scratch: places behind each slot's, for values that are never read.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        leftovers: Leftovers,
        granule: int = 1,
        num_scratch: int = 0,
    ) -> None:
        self.memory = KVMemory(dict(shapes), dtype=dtype, device=device, granule=granule, num_scratch=num_scratch)
        self._leftovers = leftovers
        self._free: list[int] = []
        self._open: dict[int, KVSlot] = {}

    @property
    def num_open(self) -> int:
        """Open slots."""
        return len(self._open)

    def check_integrity(self) -> None:
        """Every place is free or open, and every open slot fits into its place."""
        assert sorted([*self._free, *self._open]) == list(range(self.memory.num_slots)), "each place is free or open"
        assert self._free == sorted(self._free), "free places ascend"
        for index, slot in self._open.items():
            assert slot.index == index, "a slot knows its place"
            assert slot.length + slot.num_tentative <= self.memory.length, "what is stored fits"
            assert len(slot.parents) == len(slot.depths), "every tentative node has a parent and a depth"

    def clear(self) -> None:
        """Close every slot and give all memory back."""
        self.memory.clear()
        self._free.clear()
        self._open.clear()

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens.

        Slots that are too short are exchanged for longer ones, and then there are no more of them than are asked for.
        """
        memory = self.memory
        known = memory.num_slots
        if length > memory.length:
            num_slots = max(num_slots, max(self._open, default=-1) + 1)
        else:
            num_slots, length = max(num_slots, known), memory.length
        # partial nodes are noted elsewhere; what a pass is about to append is not stored yet
        behind = {index: slot.num_tentative + MAX_PARTIAL for index, slot in self._open.items()}
        used = {index: min(memory.length, slot.length + behind[index]) for index, slot in self._open.items()}
        memory.reserve(num_slots, length, used=used)
        self._free = [index for index in range(num_slots) if index not in self._open]

    def open(self) -> KVSlot:
        """An empty slot: the free one with the lowest index, so that open slots stay neighbours."""
        if not self._free:
            self.reserve(max(1, 2 * self.memory.num_slots), max(64, self.memory.length))
        slot = KVSlot(self._free.pop(0))
        self._open[slot.index] = slot
        return slot

    def close(self, slot: KVSlot) -> None:
        """Free the slot's place."""
        if self._leftovers is Leftovers.CLEARED:
            self.memory.wipe(slot.index)
        elif self._leftovers is Leftovers.MASKED:
            self.memory.scrub(slot.index)
        bisect.insort(self._free, slot.index)
        del self._open[slot.index]
        slot.index = CLOSED

    def fork(self, slot: KVSlot, length: int) -> KVSlot:
        """Copy the prefix, or the beginning of it, into a new slot."""
        assert 0 <= length <= slot.length, "a prefix is cut, not lengthened"
        target = self.open()
        self.memory.copy(slot.index, target.index, length)
        target.copy_prefix(length)
        target.offset = slot.offset
        return target

    def adopt(self, layers: Mapping[int, tuple[Tensor, Tensor]], length: int) -> KVSlot:
        """A new slot whose prefix was read elsewhere.

        Args:
            layers: keys and values of all layers, shape (kv_heads, length, dim).
            length: tokens of the prefix.
        """
        slot = self.open()
        if length > self.memory.length:
            self.reserve(self.memory.num_slots, max(length, 2 * self.memory.length))
        self.memory.write(slot.index, layers, length)
        slot.copy_prefix(length)
        return slot

    def append(self, slots: Sequence[KVSlot], jobs: Sequence[Extend]) -> list[Sequence[int]]:
        """Note the jobs' tokens in these slots; the nodes that they are there."""
        assert len({id(job.slot) for job in jobs}) == len(jobs), "a slot occurs in one job at most"
        nodes: list[Sequence[int]] = []
        for slot, job in zip(slots, jobs, strict=True):
            first = slot.num_tentative
            slot.append(job.parents)
            nodes.append(range(first, slot.num_tentative))
        longest = max(slot.length + slot.num_tentative for slot in slots)
        if longest > self.memory.length:
            self.reserve(self.memory.num_slots, max(longest, 2 * self.memory.length))
        return nodes

    def commit(self, edits: Sequence[Commit]) -> None:
        """Compact paths and kept nodes after the prefixes, in place; each edit has a slot of its own."""
        slots = [kv_slot(edit.slot) for edit in edits]
        for slot, edit in zip(slots, edits, strict=True):
            require_subtree(slot.parents, edit)
        self._settle(slots, [(*edit.path, *edit.keep) if edit.keep else edit.path for edit in edits])
        for slot, edit in zip(slots, edits, strict=True):
            slot.commit(edit.path, edit.keep)

    def truncate(self, slot: KVSlot, length: int) -> None:
        """Forget where the prefix went on; what is stored there is written over."""
        self._settle([slot], [()])
        slot.truncate(length)

    def _settle(self, slots: Sequence[KVSlot], kept: Sequence[Sequence[int]]) -> None:
        """Bring the kept nodes of each slot's tree to where it begins."""
        if self._leftovers is not Leftovers.CLEARED:
            for slot, nodes in zip(slots, kept, strict=True):
                self.memory.gather(slot.index, start=slot.length, offsets=nodes)
            return
        moves, dropped = [], []
        for slot, nodes in zip(slots, kept, strict=True):
            pairs = enumerate(nodes)
            moves += [(slot.index, slot.length + node, slot.length + place) for place, node in pairs if place != node]
            dropped += [(slot.index, slot.length + place) for place in range(len(nodes), slot.num_tentative)]
        self.memory.rearrange(moves, dropped)


def require_subtree(parents: Sequence[int], edit: Commit) -> None:
    """Assert that a commit's path goes down the tree, and that what it keeps is connected to the end of the path."""
    path, keep = edit.path, edit.keep
    assert is_path(parents, path), "a path goes down the tree"
    root = path[-1] if path else ROOT
    assert not keep or is_rooted(parents, keep, root), "a kept node needs its parent kept, and keeps its order"


def kv_slot(slot: Slot) -> KVSlot:
    """A slot as its model knows it."""
    assert isinstance(slot, KVSlot), "a slot belongs to the model that opened it"
    assert slot.index != CLOSED, "a closed slot is not used again"
    return slot
