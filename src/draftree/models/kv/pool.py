"""Allocation of a model's slots, and compaction of the nodes that are kept."""

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
"""Maximum number of partial nodes after a slot's prefix and tree."""


class Leftovers(Enum):
    """Treatment of positions whose keys and values are not kept."""

    UNREAD = auto()
    """Passes read visible positions only."""
    MASKED = auto()
    """Passes read them with weight zero: a reused slot must contain finite values only."""
    CLEARED = auto()
    """As `MASKED`, without waiting for the device: dropped positions are overwritten with zeros at once."""


class SlotPool:
    """Slots of one model in shared memory. Mutated by its model only.

    Args:
        shapes: shapes of keys and values by layer index.
        dtype: dtype of keys and values.
        device: device of keys and values.
        leftovers: treatment of positions that are not kept.
        granule: lengths are rounded up to a multiple of it.
        num_scratch: positions after the end of each slot for values that are never read.
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
        """Number of open slots."""
        return len(self._open)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every index is free or open and every open slot fits into its memory."""
        assert sorted([*self._free, *self._open]) == list(range(self.memory.num_slots)), "each index is free or open"
        assert self._free == sorted(self._free), "free indices ascend"
        for index, slot in self._open.items():
            assert slot.index == index, "a slot has its index"
            assert slot.length + slot.num_tentative <= self.memory.length, "what is stored fits"
            assert len(slot.parents) == len(slot.depths), "every tentative node has a parent and a depth"

    def clear(self) -> None:
        """Close every slot and free all memory."""
        self.memory.clear()
        self._free.clear()
        self._open.clear()

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` slots of `length` tokens.

        If slots are too short, all are reallocated, exactly as many as requested.
        """
        memory = self.memory
        known = memory.num_slots
        if length > memory.length:
            num_slots = max(num_slots, max(self._open, default=-1) + 1)
        else:
            num_slots, length = max(num_slots, known), memory.length
        # partial nodes are counted elsewhere; tokens that a pass is about to append are not stored yet
        after = {index: slot.num_tentative + MAX_PARTIAL for index, slot in self._open.items()}
        used = {index: min(memory.length, slot.length + after[index]) for index, slot in self._open.items()}
        memory.reserve(num_slots, length, used=used)
        self._free = [index for index in range(num_slots) if index not in self._open]

    def open(self) -> KVSlot:
        """Open the free slot with the lowest index, so that open slots stay neighbours."""
        if not self._free:
            self.reserve(max(1, 2 * self.memory.num_slots), max(64, self.memory.length))
        slot = KVSlot(self._free.pop(0))
        self._open[slot.index] = slot
        return slot

    def close(self, slot: KVSlot) -> None:
        """Free a slot."""
        if self._leftovers is Leftovers.CLEARED:
            self.memory.wipe(slot.index)
        elif self._leftovers is Leftovers.MASKED:
            self.memory.scrub(slot.index)
        bisect.insort(self._free, slot.index)
        del self._open[slot.index]
        slot.index = CLOSED

    def fork(self, slot: KVSlot, length: int) -> KVSlot:
        """Copy the first `length` tokens of the prefix into a new slot."""
        assert 0 <= length <= slot.length, "a prefix is cut, not lengthened"
        target = self.open()
        self.memory.copy(slot.index, target.index, length)
        target.copy_prefix(length)
        target.offset = slot.offset
        return target

    def adopt(self, layers: Mapping[int, tuple[Tensor, Tensor]], length: int) -> KVSlot:
        """Open a slot with keys and values that were computed elsewhere.

        Args:
            layers: keys and values of all layers, shape (kv_heads, length, dim).
            length: number of tokens.
        """
        slot = self.open()
        if length > self.memory.length:
            self.reserve(self.memory.num_slots, max(length, 2 * self.memory.length))
        self.memory.write(slot.index, layers, length)
        slot.copy_prefix(length)
        return slot

    def append(self, slots: Sequence[KVSlot], jobs: Sequence[Extend]) -> list[Sequence[int]]:
        """Append the jobs' tokens to these slots; return their nodes."""
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
        """Compact paths and kept nodes after the prefixes, in place; at most one edit per slot."""
        slots = [kv_slot(edit.slot) for edit in edits]
        for slot, edit in zip(slots, edits, strict=True):
            require_subtree(slot.parents, edit)
        self._settle(slots, [(*edit.path, *edit.keep) if edit.keep else edit.path for edit in edits])
        for slot, edit in zip(slots, edits, strict=True):
            slot.commit(edit.path, edit.keep)

    def truncate(self, slot: KVSlot, length: int) -> None:
        """Cut the prefix to `length` tokens and drop the tree."""
        self._settle([slot], [()])
        slot.truncate(length)

    def drop_first(self, slot: KVSlot, count: int) -> None:
        """Drop the first `count` tokens of a prefix without a tree; positions stay in the rotated keys."""
        assert not slot.num_tentative, "a slot with a tree is not cut at its beginning"
        assert count <= slot.length, "a prefix is cut, not lengthened"
        self.memory.gather(slot.index, start=0, offsets=range(count, slot.length))
        slot.copy_prefix(slot.length - count)

    def _settle(self, slots: Sequence[KVSlot], kept: Sequence[Sequence[int]]) -> None:
        """Move the kept nodes of each slot to the start of its tree."""
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
    """Assert that a commit's path descends in the tree and that kept nodes are connected to its end."""
    path, keep = edit.path, edit.keep
    assert is_path(parents, path), "a path descends in the tree"
    root = path[-1] if path else ROOT
    assert not keep or is_rooted(parents, keep, root), "a kept node needs its parent kept, and keeps its order"


def kv_slot(slot: Slot) -> KVSlot:
    """Return a slot as `KVSlot`; assert that it is open."""
    assert isinstance(slot, KVSlot), "a slot belongs to the model that opened it"
    assert slot.index != CLOSED, "a closed slot is not used again"
    return slot
