"""Recurrent states of slots, and the steps by which a pass moves them on.

A slot has a base state, after the first `base` tokens of its text, and the inputs of all later tokens, committed or
tentative, as entries in a memory of its own. A pass moves the base state on over the committed tokens and the settled
rows, and computes the states of tree nodes on the way, which are not stored. So a commit moves nothing, and no token is
read twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.models.kv.slots import KVSlot, SlotStates
from draftree.models.kv.states import StateKey
from draftree.models.native.blueprint import LinearRecurrence, Recurrence
from draftree.models.native.structures import CPass, CRecurrence

ALIGNMENT = 16  # floats of a cache line, at which the state of a layer starts
MIN_ENTRIES = 32
LEAST_KEPT = 32  # settled tokens of a pass after which the state is kept
MOST_KEPT = 4  # kept states of a slot
SETTLED = -1  # entry of a token that the base state contains


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def zeros(count: int) -> Tensor:
    """Return float32 zeros that start at a cache line; the system provides their pages on first use."""
    numbers = np.zeros(count + ALIGNMENT, dtype=np.float32)
    first = -numbers.ctypes.data % (4 * ALIGNMENT) // 4
    return torch.from_numpy(numbers[first : first + count])


@dataclass(slots=True)
class SlotTail:
    """Bookkeeping of a slot: its base state, and the entries of the tokens after it."""

    base: int = 0  # tokens of the base state
    entries: list[int] = field(default_factory=list)  # of the committed tokens after these
    nodes: list[int] = field(default_factory=list)  # of the tentative nodes; SETTLED for those of the base state
    partial: list[int] = field(default_factory=list)  # of the partial nodes
    kept: list[tuple[int, Tensor]] = field(default_factory=list)  # earlier lengths and their states, ascending

    def free_entries(self, count: int) -> list[int]:
        """Return the lowest entries that are not in use."""
        used = {*self.entries, *self.nodes, *self.partial}
        free: list[int] = []
        entry = 0
        while len(free) < count:
            if entry not in used:
                free.append(entry)
            entry += 1
        return free

    def kept_before(self, length: int) -> list[tuple[int, Tensor]]:
        return [(end, state) for end, state in self.kept if end <= length]


@dataclass(slots=True)
class StepPlan:
    """Steps of a pass, see `csrc/recurrence.h`."""

    keeps: bool  # whether the base states move on
    is_partial: bool  # whether the nodes are partial ones
    slots: list[KVSlot] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)  # rows of each slot that are settled
    new: list[list[int]] = field(default_factory=list)  # entries of each slot's rows
    run_settled: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # levels of the parents' states
    targets: list[int] = field(default_factory=list)  # levels of the steps' own states
    num_levels: int = 1

    def add(self, slot: KVSlot, tail: SlotTail, nodes: Sequence[int], *, settled: int, row: int) -> None:
        """Add the steps of a slot, whose `nodes` are the rows from `row` on, the first `settled` ones settled."""
        if self.is_partial and not nodes[0]:  # of another subset of the layers, or after an edit
            tail.partial = []
        entries = tail.partial if self.is_partial else tail.nodes
        known = len(entries)
        assert not (settled and known), "settled tokens follow a prefix without a tree"
        count = len(nodes)
        stored = tail.free_entries(count - settled if self.keeps else count)
        new = [SETTLED] * (count - len(stored)) + stored
        self.slots.append(slot)
        self.settled.append(settled)
        self.new.append(new)
        chain = len(tail.entries) + settled
        self.rows += [-1] * len(tail.entries)
        self.rows += range(row, row + settled)
        self.entries += tail.entries
        self.entries += new[:settled]
        self.parents += range(-1, chain - 1)
        self.sources += [0] * chain
        self.targets += [0] * chain
        self.run_settled.append(chain)
        if count > settled:
            self._add_tree(slot.parents, [*entries, *new], first=known, row=row - known, settled=settled, chain=chain)
        self.first.append(len(self.rows))

    def _add_tree(
        self, parents: Sequence[int], entries: Sequence[int], *, first: int, row: int, settled: int, chain: int
    ) -> None:
        """Add the nodes from `first` on that are not settled, depth first, and their ancestors; node n is row + n."""
        needed = [node >= first + settled for node in range(len(parents))]
        sizes = [1] * len(parents)  # nodes of each subtree
        children: list[list[int]] = [[] for _ in parents]
        roots: list[int] = []
        for node in range(len(parents) - 1, -1, -1):
            if not needed[node] or node < settled or entries[node] == SETTLED:
                continue
            parent = parents[node]
            if parent < settled or entries[parent] == SETTLED:
                roots.append(node)
            else:
                needed[parent] = True
                sizes[parent] += sizes[node]
                children[parent].append(node)
        step_of: dict[int, int] = {}
        start = self.first[-1]
        # the largest subtree comes last and takes its parent's level, so that levels are few
        stack = _in_order(roots, sizes, parent_step=chain - 1, level=0)
        while stack:
            node, parent_step, source, target = stack.pop()
            step = step_of[node] = len(self.rows) - start
            self.rows.append(row + node if node >= first else -1)
            self.entries.append(entries[node])
            self.parents.append(parent_step)
            self.sources.append(source)
            self.targets.append(target)
            self.num_levels = max(self.num_levels, target + 1)
            stack += _in_order(children[node], sizes, parent_step=step, level=target)

    def set_in(self, run: CPass) -> array[int]:
        """Set the steps of a pass, which refer to the returned numbers."""
        columns = {
            "step_row": self.rows,
            "step_entry": self.entries,
            "step_parent": self.parents,
            "step_from": self.sources,
            "step_to": self.targets,
            "run_slot": [slot.index for slot in self.slots],
            "run_step": self.first,
            "run_settled": self.run_settled,
        }
        numbers = array("q", [number for column in columns.values() for number in column])
        place = numbers.buffer_info()[0]
        for name, column in columns.items():
            setattr(run, name, place)
            place += len(column) * numbers.itemsize
        run.num_runs, run.num_levels, run.keeps_states = len(self.slots), self.num_levels, self.keeps
        return numbers


def _in_order(
    nodes: list[int], sizes: Sequence[int], *, parent_step: int, level: int
) -> list[tuple[int, int, int, int]]:
    """Return siblings with their parent's step and level and their own level; the last one is visited first."""
    if len(nodes) == 1:
        return [(nodes[0], parent_step, level, level)]
    largest = max(nodes, key=lambda node: sizes[node], default=None)
    return [
        (node, parent_step, level, level if node == largest else level + 1)
        for node in sorted(nodes, key=lambda node: node != largest)
    ]


class NativeStates(SlotStates):
    """Recurrent states of all layers and slots, float32. Mutated by passes and by the slots' pool only."""

    def __init__(self, layers: Mapping[int, Recurrence]) -> None:
        self._layers = layers
        self.version = 0  # changes whenever the memory is reallocated
        self._places: dict[int, tuple[int, int]] = {}  # of each layer, its first number in a state and in an entry
        self._state_size = self._entry_size = 0
        for index, layer in layers.items():
            self._places[index] = (self._state_size, self._entry_size)
            self._state_size += aligned(layer.state_size + (layer.taps - 1) * layer.channels)
            self._entry_size += aligned(layer.width)
        self._num_slots = self._num_entries = 0
        self._states = self._stored = torch.empty(0)
        self._tails: dict[int, SlotTail] = {}
        self._used: set[int] = set()  # slots whose state is not zero

    @property
    def state_bytes(self) -> int:
        """Size of the state of a slot in bytes."""
        return self._state_size * self._states.itemsize

    @property
    def entry_bytes(self) -> int:
        """Size of the inputs of a token in bytes."""
        return self._entry_size * self._states.itemsize

    def reserve(self, num_slots: int) -> None:
        if num_slots > self._num_slots:
            self._resize(num_slots, max(self._num_entries, MIN_ENTRIES))

    @torch.inference_mode()
    def _resize(self, num_slots: int, num_entries: int) -> None:
        states = zeros(num_slots * self._state_size).view(num_slots, self._state_size)
        stored = zeros(num_slots * num_entries * self._entry_size).view(num_slots, num_entries, self._entry_size)
        for index, tail in self._tails.items():
            states[index] = self._states[index]
            used = 1 + max((*tail.entries, *tail.nodes, *tail.partial), default=-1)
            stored[index, :used] = self._stored[index, :used]
        self._states, self._stored = states, stored
        self._num_slots, self._num_entries = num_slots, num_entries
        self._used = set(self._tails)
        self.version += 1

    @torch.inference_mode()
    def open(self, slot: KVSlot) -> None:
        if slot.index in self._used:
            self._states[slot.index].zero_()
            self._used.remove(slot.index)
        self._tails[slot.index] = SlotTail()

    @torch.inference_mode()
    def adopt(self, slot: KVSlot, states: Mapping[StateKey, Tensor]) -> None:
        """Give a slot the states after its prefix that a transformers model has computed; it can be cut there later."""
        packed = torch.zeros(self._state_size)
        for index, layer in self._layers.items():
            first = self._places[index][0]
            if isinstance(layer, LinearRecurrence):
                state = layer.packed_state(states[StateKey(index, "recurrent", 0)])
                packed[first : first + len(state)] = state
                first += len(state)
            # the last inputs of all convolutions of the layer, whose channels follow each other
            inputs = torch.cat([state for key, state in sorted(states.items()) if key[:2] == (index, "conv")])
            window = inputs[:, 1 - layer.taps :].T.flatten()
            packed[first : first + len(window)] = window
        self._set(slot, packed)
        tail = self._tails[slot.index]
        tail.base, tail.entries = slot.length, []
        tail.kept.append((slot.length, packed))

    def close(self, slot: KVSlot) -> None:
        del self._tails[slot.index]

    @torch.inference_mode()
    def fork(self, source: KVSlot, target: KVSlot, length: int) -> None:
        before, after = self._tails[source.index], self._tails[target.index]
        after.kept = before.kept_before(length)
        if length < before.base:
            self._restore(target, after, length)
            return
        after.base = before.base
        self._set(target, self._states[source.index])
        count = length - before.base
        after.entries = list(range(count))
        self._stored[target.index, :count] = self._stored[source.index, before.entries[:count]]

    def commit(self, slot: KVSlot, path: Sequence[int], keep: Sequence[int]) -> None:
        tail = self._tails[slot.index]
        entries = [tail.nodes[node] for node in path]
        settled = tail.nodes.count(SETTLED)
        assert entries[:settled] == [SETTLED] * settled, "settled tokens are committed"
        tail.entries += entries[settled:]
        tail.nodes = [tail.nodes[node] for node in keep]

    @torch.inference_mode()
    def truncate(self, slot: KVSlot, length: int) -> None:
        tail = self._tails[slot.index]
        tail.nodes = []
        tail.kept = tail.kept_before(length)
        if length < tail.base:
            self._restore(slot, tail, length)
        else:
            del tail.entries[length - tail.base :]

    def cut_length(self, slot: KVSlot, length: int) -> int:
        tail = self._tails[slot.index]
        if length >= tail.base:
            return length
        return max((end for end, _ in tail.kept_before(length)), default=0)

    def _restore(self, slot: KVSlot, tail: SlotTail, length: int) -> None:
        """Go back to the kept state after `length` tokens."""
        tail.base = length
        tail.entries = []
        if length:
            self._set(slot, tail.kept[-1][1])
        else:
            self._states[slot.index].zero_()

    def _set(self, slot: KVSlot, state: Tensor) -> None:
        self._states[slot.index] = state
        self._used.add(slot.index)

    def plan(
        self,
        slots: Sequence[KVSlot],
        nodes: Sequence[Sequence[int]],
        settled: Sequence[int],
        *,
        keeps: bool,
        is_partial: bool = False,
    ) -> StepPlan:
        """Return the steps of a pass over these nodes, of which the first `settled` ones of each slot are settled.

        With `keeps`, base states move on; otherwise the pass runs through some of the layers only. The slots of partial
        nodes count these alone, and none of them is settled.
        """
        plan = StepPlan(keeps, is_partial)
        row = 0
        for slot, chosen, count in zip(slots, nodes, settled, strict=True):
            plan.add(slot, self._tails[slot.index], chosen, settled=count, row=row)
            row += len(chosen)
        most = 1 + max((max(entries, default=-1) for entries in plan.new), default=-1)
        if most > self._num_entries:
            self._resize(self._num_slots, max(most, 2 * self._num_entries))
        return plan

    @property
    def strides(self) -> tuple[int, int, int]:
        """Numbers from one slot to the next of states and of stored inputs, and from one entry to the next."""
        return self._state_size, self._num_entries * self._entry_size, self._entry_size

    def point(self, layers: Sequence[Any]) -> None:
        """Set where a pass finds states and stored inputs, in the structures of all layers."""
        for index, (state, entry) in self._places.items():
            own = CRecurrence.from_address(layers[index].recurrence)
            own.states = self._states.data_ptr() + 4 * state
            own.stored = self._stored.data_ptr() + 4 * entry

    def note(self, plan: StepPlan) -> None:
        """Record a pass that is done."""
        for slot, settled, new in zip(plan.slots, plan.settled, plan.new, strict=True):
            tail = self._tails[slot.index]
            self._used.add(slot.index)
            if plan.is_partial:
                tail.partial += new
                continue
            tail.partial = []
            tail.nodes += new
            if not plan.keeps:
                continue
            tail.base = max(tail.base, slot.length + settled)  # larger: settled tokens of an earlier pass
            tail.entries = []
            if settled >= LEAST_KEPT:
                tail.kept = [*tail.kept, (tail.base, self._states[slot.index].clone())][-MOST_KEPT:]
