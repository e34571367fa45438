"""Recurrent states of slots as tensors: one row per slot, per tentative node and per kept earlier length.

A mixer reads the rows of a node's parents and writes the node's own. Settled tokens move the slot's own row in place,
so that plain decoding copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.core.tensors import to_device
from draftree.core.tree import ROOT
from draftree.models.kv.slots import KVSlot, SlotStates

MIN_KEPT_CHAIN = 32  # settled tokens of a pass whose end is kept: copying the state is cheap beside reading them
MAX_KEPT = 4  # earlier lengths of a slot whose states are kept


class StateKey(NamedTuple):
    """Identity of a state in a model."""

    layer: int
    kind: Literal["conv", "recurrent"]
    place: int  # number of the state among those of its kind in the layer


@dataclass(frozen=True, slots=True)
class StateShape:
    shape: tuple[int, ...]  # of one sequence
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class StateMemory:
    """States of all layers: for each key a tensor of shape (rows, ...). Mutated by passes and by `RecurrentStates`.

    The first rows belong to slots, the others are spare and are counted from there.
    """

    def __init__(self, shapes: Mapping[StateKey, StateShape], device: torch.device) -> None:
        self._keys: dict[StateShape, list[StateKey]] = {}
        for key, shape in sorted(shapes.items()):
            self._keys.setdefault(shape, []).append(key)
        self._device = device
        self._stores: list[Tensor] = []  # shape (keys, rows, ...) each
        self._states: dict[StateKey, Tensor] = {}
        self.num_slots = self.num_spare = 0
        self.resize(0, 0)

    @property
    def row_bytes(self) -> int:
        return sum(shape.num_bytes * len(keys) for shape, keys in self._keys.items())

    @torch.inference_mode()
    def resize(self, num_slots: int, num_spare: int) -> None:
        """Change the numbers of rows; the rows that remain are kept."""
        stores = []
        for index, (shape, keys) in enumerate(self._keys.items()):
            size = (len(keys), num_slots + num_spare, *shape.shape)
            store = torch.empty(size, dtype=shape.dtype, device=self._device)
            if self._stores:
                slots, spare = min(num_slots, self.num_slots), min(num_spare, self.num_spare)
                old = self._stores[index]
                store[:, :slots] = old[:, :slots]
                store[:, num_slots : num_slots + spare] = old[:, self.num_slots : self.num_slots + spare]
            stores.append(store)
            self._states.update(zip(keys, store, strict=True))
        self._stores, self.num_slots, self.num_spare = stores, num_slots, num_spare

    def __getitem__(self, key: StateKey) -> Tensor:
        return self._states[key]

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy a row of all layers."""
        for store in self._stores:
            store[:, target] = store[:, source]

    @torch.inference_mode()
    def write(self, row: int, states: Mapping[StateKey, Tensor]) -> None:
        """Write a row: the state of each key, without an axis for sequences."""
        for key, state in states.items():
            self._states[key][row] = state


@dataclass(slots=True, eq=False)
class KeptState:
    """State at an earlier length of one or several slots."""

    length: int
    row: int  # spare row
    num_slots: int = 1  # slots that refer to it


@dataclass(slots=True, eq=False)
class SlotRecord:
    """Rows of one slot beside its own."""

    slot: KVSlot
    kept: list[KeptState] = field(default_factory=list)  # lengths ascend
    nodes: dict[int, int] = field(default_factory=dict)  # spare row of each tentative node; settled ones have none
    num_settled: int = 0
    """First tentative nodes over which the slot's own row has moved on, or may have if the pass failed."""
    is_lost: bool = False  # whether the slot's own row is ahead of its prefix
    partial: KVSlot | None = None  # owner of the partial nodes
    partial_nodes: dict[int, int] = field(default_factory=dict)

    @property
    def is_current(self) -> bool:
        """Whether the state at the end of the prefix is known."""
        return self.slot.length == 0 or not (self.num_settled or self.is_lost)


@dataclass(frozen=True, slots=True)
class StateStep:
    """Step of all mixers in a pass: tokens of different sequences, or a chain of one sequence.

    `rows`: of the pass, in the order in which the mixer takes them. `sources` and `targets`: rows of the state memory
    before and after the step, one for each sequence; `sources` is None for sequences without a token.
    """

    rows: slice | Tensor
    num_rows: int
    is_chain: bool
    sources: slice | Tensor | None
    targets: slice | Tensor

    @property
    def is_in_place(self) -> bool:
        return isinstance(self.sources, slice) and self.sources == self.targets


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Steps of one pass, in order; `places` is the place of each row of the pass in the rows of all steps."""

    steps: Sequence[StateStep]
    num_rows: int
    places: Tensor | None  # None if the order is the same


@dataclass(slots=True)
class _Level:
    rows: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class RecurrentStates(SlotStates):
    """Rows of the state memory by slot, node and kept length.

    `min_chain`: settled tokens of a job from which on they run as a chain. `continues`: whether mixers run a chain from
    a state, and not only from none.
    """

    def __init__(
        self, shapes: Mapping[StateKey, StateShape], *, device: torch.device, min_chain: int, continues: bool
    ) -> None:
        self.memory = StateMemory(shapes, device)
        self._device = device
        self._min_chain = min_chain
        self._continues = continues
        self._records: dict[int, SlotRecord] = {}
        self._free: list[int] = []  # spare rows, the next one last

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot's own row and of those of its kept lengths, at most."""
        return (1 + MAX_KEPT) * self.memory.row_bytes

    @property
    def num_rows_in_use(self) -> int:
        """Number of spare rows that belong to nodes and kept lengths."""
        return self.memory.num_spare - len(self._free)

    def clear(self) -> None:
        self._records.clear()
        self._free.clear()
        self.memory.resize(0, 0)

    def reserve(self, num_slots: int) -> None:
        if num_slots > self.memory.num_slots:
            self.memory.resize(num_slots, self.memory.num_spare)

    def open(self, slot: KVSlot) -> None:
        self._records[slot.index] = SlotRecord(slot)

    def adopt(self, slot: KVSlot, states: Mapping[StateKey, Tensor]) -> None:
        """Give a slot the states after its prefix, computed elsewhere; it can be cut there later."""
        self.memory.write(slot.index, states)
        self._keep(self._records[slot.index], slot.length)

    def close(self, slot: KVSlot) -> None:
        record = self._records.pop(slot.index)
        self._drop_nodes(record)
        self._drop_kept(record, record.kept)

    def cut_length(self, slot: KVSlot, length: int) -> int:
        record = self._records[slot.index]
        lengths = [kept.length for kept in record.kept if kept.length <= length]
        if slot.length <= length and record.is_current:
            lengths.append(slot.length)
        return max(lengths, default=0)

    def fork(self, source: KVSlot, target: KVSlot, length: int) -> None:
        record, copy = self._records[source.index], self._records[target.index]
        self._load(record, length, target.index)
        copy.kept = [kept for kept in record.kept if kept.length <= length]
        for kept in copy.kept:
            kept.num_slots += 1

    def truncate(self, slot: KVSlot, length: int) -> None:
        record = self._records[slot.index]
        self._load(record, length, slot.index)
        self._drop_nodes(record)
        later = [kept for kept in record.kept if kept.length > length]
        self._drop_kept(record, later)
        record.num_settled, record.is_lost = 0, False

    def commit(self, slot: KVSlot, path: Sequence[int], keep: Sequence[int]) -> None:
        record = self._records[slot.index]
        settled = record.num_settled
        if list(path[:settled]) != list(range(settled)):
            record.is_lost = True  # the slot's own row has moved over tokens that are dropped
        elif not record.is_lost:
            if settled >= MIN_KEPT_CHAIN:
                self._keep(record, slot.length + settled)
            if len(path) > settled:
                self.memory.copy(self._spare(record.nodes[path[-1]]), slot.index)
        nodes = {number: record.nodes.pop(node) for number, node in enumerate(keep)}
        self._drop_nodes(record)
        record.nodes, record.num_settled = nodes, 0

    def resume(self, slot: KVSlot, partial: KVSlot, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Make partial nodes tentative ones: each gets the row of its partial node."""
        record = self._records[slot.index]
        assert record.partial is partial, "the partial nodes are the slot's"
        for source, target in zip(sources, targets, strict=True):
            row = record.partial_nodes.pop(source, None)
            if row is None:  # two nodes with the same tokens
                first = targets[sources.index(source)]
                row = self._take()
                self.memory.copy(self._spare(record.nodes[first]), self._spare(row))
            record.nodes[target] = row

    def plan(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], settled: Sequence[int]) -> StatePlan:
        """Return the steps of a pass over these nodes, ascending, the first `settled` of which are settled.

        Settled tokens move the rows of their slots, unless the pass runs partial nodes.
        """
        steps: list[tuple[bool, bool, _Level]] = []  # is chain, starts from nothing
        levels: list[dict[bool, _Level]] = []

        def add(level: int, row: int, source: int | None, target: int) -> None:
            while len(levels) <= level:
                levels.append({})
            group = levels[level].setdefault(source is None, _Level())
            group.rows.append(row)
            group.sources.append(-1 if source is None else source)
            group.targets.append(target)

        first_row = 0
        for slot, chosen, settled_count in zip(slots, nodes, settled, strict=True):
            record = self._records[slot.index]
            is_whole = slot is record.slot
            count = settled_count if is_whole else 0
            rows = self._rows(record, slot, chosen[count:])
            if is_whole:
                self._move_on(record, first=chosen[0], count=count)
            own, start = slot.index, None if slot.length == 0 else slot.index
            depth: dict[int, int] = {}  # level after each node
            is_chain = count >= self._min_chain and (self._continues or start is None)
            if is_chain:
                sources = [] if start is None else [own]
                chain = _Level(list(range(first_row, first_row + count)), sources, [own])
                steps.append((True, start is None, chain))
            for place in range(count):
                if not is_chain:
                    add(place, first_row + place, start if place == 0 else own, own)
            for place, node in enumerate(chosen[count:], count):
                parent = slot.parents[node]
                if parent == ROOT and not record.num_settled:
                    level, source = 0, start
                elif parent == record.num_settled - 1:
                    level, source = 0 if is_chain or count == 0 else count, own
                else:
                    level, source = depth.get(parent, 0), self._spare(rows[parent])
                depth[node] = level + 1
                add(level, first_row + place, source, self._spare(rows[node]))
            first_row += len(chosen)
        steps.extend((False, is_start, group) for level in levels for is_start, group in sorted(level.items()))
        return self._plan(steps, first_row)

    def _move_on(self, record: SlotRecord, *, first: int, count: int) -> None:
        """Note that the slot's own row moves over the first `count` nodes of a pass that begins at node `first`."""
        if record.slot.length == 0:
            record.is_lost = False
        assert not record.is_lost, "a prefix goes on where its state is known"
        assert record.num_settled <= first or record.num_settled == count, "settled nodes are the first ones of a tree"
        record.num_settled = max(record.num_settled, count)

    def _plan(self, steps: Sequence[tuple[bool, bool, _Level]], num_rows: int) -> StatePlan:
        order = [row for _, _, step in steps for row in step.rows]
        is_ordered = order == list(range(num_rows))
        return StatePlan(
            [
                StateStep(
                    rows=self._index(step.rows),
                    num_rows=len(step.rows),
                    is_chain=is_chain,
                    sources=None if is_start else self._index(step.sources),
                    targets=self._index(step.targets),
                )
                for is_chain, is_start, step in steps
            ],
            num_rows,
            None if is_ordered else to_device(np.argsort(order), self._device),
        )

    def _index(self, numbers: list[int]) -> slice | Tensor:
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return slice(numbers[0], numbers[0] + len(numbers))
        return to_device(numbers, self._device)

    def _rows(self, record: SlotRecord, slot: KVSlot, nodes: Sequence[int]) -> dict[int, int]:
        """Return the rows of a slot's nodes, or of its partial ones; those that have none get one."""
        if slot is record.slot:
            rows = record.nodes
        else:
            if record.partial is not slot:
                self._release(record.partial_nodes.values())
                record.partial, record.partial_nodes = slot, {}
            rows = record.partial_nodes
        missing = [node for node in nodes if node not in rows]
        self._provide(len(missing))
        rows.update((node, self._free.pop()) for node in missing)
        return rows

    def _spare(self, row: int) -> int:
        return self.memory.num_slots + row

    def _take(self) -> int:
        self._provide(1)
        return self._free.pop()

    def _provide(self, count: int) -> None:
        """Make room for this many more spare rows."""
        missing = count - len(self._free)
        if missing > 0:
            first = self.memory.num_spare
            more = max(missing, first // 2)
            self.memory.resize(self.memory.num_slots, first + more)
            self._release(range(first, first + more))

    def _release(self, rows: Iterable[int]) -> None:
        self._free.extend(rows)
        self._free.sort(reverse=True)

    def _drop_nodes(self, record: SlotRecord) -> None:
        self._release([*record.nodes.values(), *record.partial_nodes.values()])
        record.nodes, record.partial, record.partial_nodes = {}, None, {}

    def _drop_kept(self, record: SlotRecord, dropped: Sequence[KeptState]) -> None:
        for kept in dropped:
            kept.num_slots -= 1
            if not kept.num_slots:
                self._release([kept.row])
        record.kept = [kept for kept in record.kept if kept not in dropped]

    def _keep(self, record: SlotRecord, length: int) -> None:
        self._drop_kept(record, record.kept[: max(0, len(record.kept) - MAX_KEPT + 1)])
        row = self._take()
        self.memory.copy(record.slot.index, self._spare(row))
        record.kept.append(KeptState(length, row))

    def _load(self, record: SlotRecord, length: int, target: int) -> None:
        """Copy the state after `length` tokens to a slot's own row; an empty slot has none."""
        if length == 0:
            return
        if length == record.slot.length and record.is_current:
            if target != record.slot.index:
                self.memory.copy(record.slot.index, target)
            return
        row = next(kept.row for kept in record.kept if kept.length == length)
        self.memory.copy(self._spare(row), target)
