"""Slots: preallocated keys and values compacted in place, their allocation, and partial nodes."""

from __future__ import annotations

import bisect
import contextlib
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.host import single_threaded
from draftree.core.node_map import NodeMap
from draftree.core.tensors import to_device
from draftree.core.tree import ROOT, is_path, is_rooted
from draftree.models.base import Commit, Extend, LayerSubset, Slot
from draftree.models.memory import free_memory
from draftree.sampling.logits import Logits

MIN_LENGTH = 1024  # slots have multiples of so many tokens, if there is room
MIN_HELD = 64  # slots for which host memory is reserved, if there is room
CLOSED = -1  # index of a closed slot


class KVSlot(Slot):
    """Bookkeeping of a slot. Mutated by its model only."""

    __slots__ = ("depths", "index", "length", "offset", "parents", "partial")

    length: int

    def __init__(self, index: int) -> None:
        self.index = index
        self.length = 0
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.partial: PartialTree | None = None
        self.offset = 0
        """Position minus index of a token; not zero after images, which may take fewer positions than tokens."""

    @property
    def id(self) -> int:
        return self.index

    @property
    def num_tentative(self) -> int:
        return len(self.parents)

    @property
    def num_stored(self) -> int:
        """Tentative nodes, or partial ones in their places if these are more."""
        return max(self.num_tentative, self.partial.nodes.num_tentative if self.partial else 0)

    def append(self, parents: Sequence[int]) -> None:
        for parent in parents:
            assert ROOT <= parent < len(self.parents), "a parent must be an earlier tentative node"
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
            self.parents.append(parent)

    def commit(self, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Append a path, stored first, to the prefix; the nodes to keep, stored next, become the tentative tree."""
        self.length += len(path)
        self.partial = None
        if not keep:
            self.parents.clear()
            self.depths.clear()
            return
        root = path[-1] if path else ROOT
        self.parents = NodeMap.keeping(self.parents, keep, root=root).derived_parents
        self.depths = [self.depths[node] - len(path) for node in keep]

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, "a prefix is cut, not lengthened"
        self.length = length
        self.commit(())


@dataclass(frozen=True, slots=True)
class LayerShape:
    kv_heads: int
    key_dim: int
    value_dim: int


class KVMemory:
    """Keys and values of all layers and slots. Mutated by passes and commits."""

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_scratch: int = 0,
    ) -> None:
        self._shapes = shapes
        self.dtype = dtype
        self._device = device
        self.num_scratch = num_scratch  # positions after the end of each slot for values that are never read
        self.version = 0  # token that changes whenever the memory is reallocated
        self.num_slots = 0
        self.length = 0
        self._stores: list[tuple[Tensor, Tensor]] = []
        self._num_held = 0  # number of slots that fit into the memory
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def is_on_host(self) -> bool:
        return self._device.type == "cpu"

    @property
    def largest_dim(self) -> int:
        return max(max(shape.key_dim, shape.value_dim) for layer, shape in self._shapes.items() if layer >= 0)

    @property
    def token_bytes(self) -> int:
        values = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in self._shapes.values())
        return values * self.dtype.itemsize

    def clear(self) -> None:
        self.num_slots = self.length = self._num_held = 0
        self.version += 1
        self._stores = []
        self.keys, self.values = {}, {}

    def reserve(self, num_slots: int, length: int, *, used: Mapping[int, int]) -> None:
        """Make room for at least this length. The first `used` tokens of each slot are kept, all others are lost."""
        if (num_slots, length) == (self.num_slots, self.length):
            return
        if length > self.length or num_slots > self._num_held:
            self._exchange(num_slots, length, used)
        self.version += 1
        self.num_slots = num_slots
        for (keys, values), layers in zip(self._stores, self._layers_by_shape().values(), strict=True):
            for place, layer in enumerate(layers):
                self.keys[layer], self.values[layer] = keys[:num_slots, place], values[:num_slots, place]

    def _exchange(self, num_slots: int, length: int, used: Mapping[int, int]) -> None:
        held, longer = num_slots, length
        if self.is_on_host:  # untouched memory costs nothing: more and longer slots fit without a copy
            # passes of static shapes, which need scratch, read all of a slot
            held, longer = max(num_slots, MIN_HELD), length if self.num_scratch else whole_length(length)
        try:
            stores = self._stores_of(held, longer)
        except (MemoryError, OSError):  # on a system that counts untouched memory as well
            held, longer = num_slots, length
            stores = self._stores_of(held, longer)
        with single_threaded():
            for old, new in zip(self._slots(), chain.from_iterable(stores), strict=False):  # there may be no old ones
                for slot, count in used.items():
                    new[slot, :, :, :count] = old[slot, :, :, :count]
        self._stores = stores
        self._num_held = held
        self.length = longer

    def _stores_of(self, num_slots: int, length: int) -> list[tuple[Tensor, Tensor]]:
        def zeros(*shape: int) -> Tensor:
            if not self.is_on_host or 0 in shape:
                return torch.zeros(shape, dtype=self.dtype, device=self._device)
            return untouched(math.prod(shape) * self.dtype.itemsize).view(self.dtype).view(shape)

        stores = []
        for shape, layers in self._layers_by_shape().items():
            first = (num_slots, len(layers), shape.kv_heads, length + self.num_scratch)
            stores.append((zeros(*first, shape.key_dim), zeros(*first, shape.value_dim)))
        return stores

    def with_room_to_grow(self, num_slots: int, length: int) -> tuple[int, int]:
        """Return more and longer slots if half of the free memory holds them: every growth drops all graphs."""
        wide = 1 << max(0, num_slots - 1).bit_length()
        long = whole_length(length)
        free = free_memory(self._device)
        is_small = free is not None and wide * (long + self.num_scratch) * self.token_bytes <= free // 2
        return (wide, long) if is_small else (num_slots, length)

    def _layers_by_shape(self) -> dict[LayerShape, list[int]]:
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in sorted(self._shapes.items()):
            groups.setdefault(shape, []).append(layer)
        return groups

    def _slots(self) -> Iterator[Tensor]:
        """Yield all keys and values, shape (slots, layers, kv_heads, length, dim) each."""
        return chain.from_iterable(self._stores)

    @torch.inference_mode()
    def rearrange(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move tokens of many slots at once, each from slot and position to a position; the host does not wait."""
        if not moves:
            return
        slot, source, target = to_device(moves, self._device).unbind(1)
        for store in self._slots():
            store[slot, :, :, target] = store[slot, :, :, source]

    @torch.inference_mode()
    def wipe(self, slot: int) -> None:
        for store in self._slots():
            store[slot].zero_()

    def gather(self, slot: int, *, start: int, offsets: Sequence[int]) -> None:
        """Move the tokens at start + offsets to start, start + 1, …; all sources are read first."""
        if list(offsets) != list(range(len(offsets))):
            with single_threaded(), torch.inference_mode():
                source = to_device([start + offset for offset in offsets], self._device)
                for store in self._slots():
                    view = store[slot]
                    view[:, :, start : start + len(offsets)] = view.index_select(2, source)

    @torch.inference_mode()
    def move(self, slot: KVSlot, sources: Sequence[int], targets: Sequence[int], *, layers: Iterable[int]) -> None:
        """Move tentative tokens to other positions in some layers only; all sources are read first."""
        if list(sources) == list(targets):
            return
        to, came_from = (torch.tensor(nodes, device=self._device) + slot.length for nodes in (targets, sources))
        for layer in self.keys.keys() & layers:
            for store in (self.keys[layer][slot.index], self.values[layer][slot.index]):
                store[:, to] = store[:, came_from]

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        with single_threaded():  # other threads may be busy for longer than this takes
            for store in self._slots():
                store[target, :, :, :length] = store[source, :, :, :length]

    @torch.inference_mode()
    def write(self, slot: int, layers: Mapping[int, tuple[Tensor, Tensor]], length: int) -> None:
        """Write the first `length` tokens of a slot: keys and values of all layers, shape (kv_heads, length, dim)."""
        for layer, (keys, values) in layers.items():
            self.keys[layer][slot, :, :length] = keys
            self.values[layer][slot, :, :length] = values

    @torch.inference_mode()
    def scrub(self, slot: int) -> None:
        """Fill a slot with zeros if it has values that are not finite: weight 0 times NaN is NaN."""
        if not self.is_on_host:  # to ask would wait
            self.wipe(slot)
            return
        # a value that is not finite in one layer is not finite in any later layer
        last = max(self._shapes, default=None)
        if last is None or bool(self.values[last][slot].sum(dtype=torch.float32).isfinite()):
            return
        self.wipe(slot)


def whole_length(length: int) -> int:
    """Return the smallest multiple of `MIN_LENGTH` that is not less, at least one."""
    return max(1, -(-length // MIN_LENGTH)) * MIN_LENGTH


def untouched(num_bytes: int) -> Tensor:
    """Return zero bytes whose pages take memory and time when they are first written.

    Pages are small: with the first token of a slot, huge ones would take memory for all of its tokens.
    """
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Leftovers(Enum):
    """Treatment of positions whose keys and values are not kept."""

    UNREAD = auto()  # passes read visible positions only
    MASKED = auto()  # passes read them with weight zero: a reused slot must contain finite values only


class SlotStates(ABC):
    """Recurrent states of the slots of one model, beside keys and values. Mutated by the slots' pool only.

    A slot has a state at the end of its prefix, at some earlier lengths, and for each tentative node one that follows
    from its parent's.
    """

    @abstractmethod
    def reserve(self, num_slots: int) -> None:
        """Make room for `num_slots` slots, and keep the states of the open ones."""

    @abstractmethod
    def open(self, slot: KVSlot) -> None:
        """Start a slot with the state of no token."""

    @abstractmethod
    def close(self, slot: KVSlot) -> None:
        """Drop the states of a slot."""

    @abstractmethod
    def fork(self, source: KVSlot, target: KVSlot, length: int) -> None:
        """Give an open slot the state after the first `length` tokens of another, a cut length of it."""

    @abstractmethod
    def commit(self, slot: KVSlot, path: Sequence[int], keep: Sequence[int]) -> None:
        """Move on to the end of a path, and renumber the nodes to keep. The slot counts both afterwards."""

    @abstractmethod
    def truncate(self, slot: KVSlot, length: int) -> None:
        """Go back to the state after `length` tokens, a cut length; drop all nodes."""

    @abstractmethod
    def cut_length(self, slot: KVSlot, length: int) -> int:
        """Return the largest length, at most `length`, whose state is kept."""

    def resume(self, slot: KVSlot, partial: KVSlot, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give tentative nodes the states of partial ones, in the layers that those ran through."""
        raise NotImplementedError


class SlotPool:
    """Slots of one model in shared memory. Mutated by its model only.

    `states`: of recurrent layers; None if keys and values are all.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        leftovers: Leftovers,
        num_scratch: int = 0,
        states: SlotStates | None = None,
    ) -> None:
        self.memory = KVMemory(dict(shapes), dtype=dtype, device=device, num_scratch=num_scratch)
        self.states = states
        self._leftovers = leftovers
        self._free: list[int] = []
        self._open: dict[int, KVSlot] = {}

    @property
    def num_open(self) -> int:
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
        self.memory.clear()
        self._free.clear()
        self._open.clear()

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room; slots that are too short are all reallocated, exactly as many as requested."""
        memory = self.memory
        if length > memory.length:
            num_slots = max(num_slots, max(self._open, default=-1) + 1)
        else:
            num_slots, length = max(num_slots, memory.num_slots), memory.length
        if not memory.is_on_host:
            num_slots, length = memory.with_room_to_grow(num_slots, length)
        # tokens that a pass is about to append are not stored yet
        used = {index: min(memory.length, slot.length + slot.num_stored) for index, slot in self._open.items()}
        memory.reserve(num_slots, length, used=used)
        if self.states is not None:
            self.states.reserve(num_slots)
        self._free = [index for index in range(num_slots) if index not in self._open]

    def open(self) -> KVSlot:
        """Open the free slot with the lowest index, so that open slots stay neighbours."""
        if not self._free:
            self.reserve(max(1, 2 * self.memory.num_slots), max(64, self.memory.length))
        slot = KVSlot(self._free.pop(0))
        self._open[slot.index] = slot
        if self.states is not None:
            self.states.open(slot)
        return slot

    def close(self, slot: KVSlot) -> None:
        if self._leftovers is Leftovers.MASKED:
            self.memory.scrub(slot.index)
        if self.states is not None:
            self.states.close(slot)
        bisect.insort(self._free, slot.index)
        del self._open[slot.index]
        slot.index = CLOSED

    def fork(self, slot: KVSlot, length: int) -> KVSlot:
        assert 0 <= length <= slot.length, "a prefix is cut, not lengthened"
        target = self.open()
        self.memory.copy(slot.index, target.index, length)
        if self.states is not None:
            self.states.fork(slot, target, length)
        target.length = length
        target.offset = slot.offset
        return target

    def adopt(self, layers: Mapping[int, tuple[Tensor, Tensor]], length: int) -> KVSlot:
        """Open a slot with keys and values by layer, shape (kv_heads, length, dim), computed elsewhere."""
        slot = self.open()
        self.lengthen(length)
        self.memory.write(slot.index, layers, length)
        slot.length = length
        return slot

    def append(self, slots: Sequence[KVSlot], jobs: Sequence[Extend]) -> list[Sequence[int]]:
        assert len({id(job.slot) for job in jobs}) == len(jobs), "a slot occurs in one job at most"
        nodes: list[Sequence[int]] = []
        for slot, job in zip(slots, jobs, strict=True):
            first = slot.num_tentative
            slot.append(job.parents)
            nodes.append(range(first, slot.num_tentative))
        self.lengthen(max(slot.length + slot.num_tentative for slot in slots))
        return nodes

    def lengthen(self, length: int) -> None:
        """Make slots of at least so many tokens."""
        if length > self.memory.length:
            self.reserve(self.memory.num_slots, max(length, 2 * self.memory.length))

    def commit(self, edits: Sequence[Commit]) -> None:
        """Compact paths and kept nodes after the prefixes, in place; at most one edit per slot."""
        slots = [kv_slot(edit.slot) for edit in edits]
        for slot, edit in zip(slots, edits, strict=True):
            require_subtree(slot.parents, edit)
        self._settle(slots, [(*edit.path, *edit.keep) if edit.keep else edit.path for edit in edits])
        for slot, edit in zip(slots, edits, strict=True):
            if self.states is not None:
                self.states.commit(slot, edit.path, edit.keep)
            slot.commit(edit.path, edit.keep)

    def truncate(self, slot: KVSlot, length: int) -> None:
        assert self.cut_length(slot, length) == length, "a prefix is cut where its state is kept"
        self._settle([slot], [()])
        if self.states is not None:
            self.states.truncate(slot, length)
        slot.truncate(length)

    def cut_length(self, slot: KVSlot, length: int) -> int:
        return length if self.states is None else self.states.cut_length(slot, length)

    def resume(
        self, slot: KVSlot, partial: KVSlot, sources: Sequence[int], targets: Sequence[int], *, layers: Iterable[int]
    ) -> None:
        """Make partial nodes of a slot tentative ones in some layers: keys and values, and states."""
        self.memory.move(partial, sources, targets, layers=layers)
        if self.states is not None:
            self.states.resume(slot, partial, sources, targets)

    def drop_first(self, slot: KVSlot, count: int) -> None:
        """Drop the first `count` tokens of a prefix without a tree; positions stay in the rotated keys."""
        assert self.states is None, "a recurrent state has no beginning to drop"
        assert not slot.num_tentative, "a slot with a tree is not cut at its beginning"
        assert count <= slot.length, "a prefix is cut, not lengthened"
        self.memory.gather(slot.index, start=0, offsets=range(count, slot.length))
        slot.length -= count

    def _settle(self, slots: Sequence[KVSlot], kept: Sequence[Sequence[int]]) -> None:
        if self.memory.is_on_host:
            for slot, nodes in zip(slots, kept, strict=True):
                self.memory.gather(slot.index, start=slot.length, offsets=nodes)
            return
        self.memory.rearrange(
            [
                (slot.index, slot.length + node, slot.length + place)
                for slot, nodes in zip(slots, kept, strict=True)
                for place, node in enumerate(nodes)
                if place != node
            ]
        )


def require_subtree(parents: Sequence[int], edit: Commit) -> None:
    """Assert that a commit's path descends in the tree and that kept nodes are connected to its end."""
    root = edit.path[-1] if edit.path else ROOT
    assert is_path(parents, edit.path), "a path descends in the tree"
    is_subtree = not edit.keep or is_rooted(parents, edit.keep, root)
    assert is_subtree, "a kept node needs its parent kept, and keeps its order"


def kv_slot(slot: Slot) -> KVSlot:
    assert isinstance(slot, KVSlot), "a slot belongs to the model that opened it"
    assert slot.index != CLOSED, "a closed slot is not used again"
    return slot


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Range of layers that the rows of one pass run through."""

    first: int  # first layer
    end: int  # layer after the last
    part: LayerSubset | None = None  # attentions and perceptrons that are skipped; None for none
    hidden: Tensor | None = None  # input of the first layer, shape (rows, hidden); None for the tokens' embeddings
    keeps_hidden: bool = False  # whether the output of the last layer is returned, to continue from it
    # layers whose input, the residual stream, is returned for every row; `end` selects the output of the last layer
    # that is run, before the final norm
    capture: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.capture:
            require_capture(self.capture, first=self.first, end=self.end)

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers whose input a pass must copy: `capture`, then `end` if `keeps_hidden` is set."""
        return (*self.capture, self.end) if self.keeps_hidden else self.capture

    @property
    def is_plain(self) -> bool:
        """Whether rows start at embeddings, no sublayer is skipped and only logits are returned."""
        return self.part is None and self.hidden is None and not self.keeps_hidden and not self.capture

    def output(self, logits: Logits, captured: Tensor | None) -> RangeOutput:
        """Return the output of a pass that copied the inputs of `captured_layers`, shape (rows, layers, hidden)."""
        if captured is None:
            return RangeOutput(logits)
        hidden = captured[:, -1] if self.keeps_hidden else None
        return RangeOutput(logits, hidden, captured[:, : len(self.capture)] if self.capture else None)

    @property
    def num_sublayers(self) -> int:
        """Number of attentions and perceptrons that every row runs through."""
        return 2 * (self.end - self.first) if self.part is None else self.part.num_sublayers(self.end)

    def is_whole(self, num_layers: int) -> bool:
        """Return whether the rows run through all `num_layers` layers and only logits are returned."""
        return (self.first, self.end) == (0, num_layers) and self.is_plain

    def skipped(self, starts: Sequence[int]) -> np.ndarray | None:
        """Return two flags per native layer: whether its attention, and its perceptron, are skipped.

        `starts`: the first native layer of each layer, and their number. A layer with two has its perceptron in the
        first one, beside the residual stream, and its mixer in the second; the first is skipped as a whole.
        """
        if self.part is None or not (self.part.attention or self.part.mlp):
            return None
        flags = np.zeros((starts[-1], 2), dtype=np.uint8)
        flags[[starts[layer + 1] - 1 for layer in self.part.attention], 0] = 1
        flags[[starts[layer + 1] - 1 for layer in self.part.mlp], 1] = 1
        for start, end in pairwise(starts):
            if end - start > 1:
                flags[start] = flags[end - 1].any()
        return flags


@dataclass(frozen=True, slots=True)
class RangeOutput:
    logits: Logits  # logits of the requested rows
    hidden: Tensor | None = None  # output of the last layer, shape (rows, hidden); None if it was not requested
    # input of the captured layers, for every row in the order of the jobs, shape (rows, captured layers, hidden),
    # float32, or float64 for a float64 model; None if none was requested
    captured: Tensor | None = None


def require_capture(capture: Sequence[int], *, first: int, end: int) -> None:
    strange = [layer for layer in capture if not first <= layer <= end]
    if strange:
        raise ConfigurationError(
            f"layer {strange[0]} cannot be captured: this pass runs layers {first} to {end - 1}, so choose indices "
            f"from {first} to {end}, where {end} stands for the output of the last layer"
        )


class PartialTree:
    """Partial nodes of one slot. Mutated by the slot's model only.

    A partial node's keys and values are stored in its slot like those of a tentative node. If the subset is the
    first layers, a pass over the same token after the same ancestors starts from the stored hidden state and runs
    the other layers only.
    """

    def __init__(self, slot: KVSlot, part: LayerSubset) -> None:
        self.part = part
        self.nodes = KVSlot(slot.index)
        """Bookkeeping of the nodes in the form that passes use: same prefix, same positions."""
        self.nodes.length = slot.length
        self.nodes.offset = slot.offset
        self._places: dict[tuple[int, int], int] = {}
        self._hidden: list[Tensor] = []

    @property
    def end(self) -> int:
        assert self.part.end is not None, "only the first layers have an end"
        return self.part.end

    @property
    def keeps_hidden(self) -> bool:
        """Whether a whole pass can continue from the nodes."""
        return bool(self._hidden)

    def note(self, tokens: Sequence[int], parents: Sequence[int], hidden: Tensor | None) -> None:
        """Add nodes with their hidden states, shape (nodes, hidden), or None if no pass can continue from them."""
        first = self.nodes.num_tentative - len(tokens)
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), first):
            self._places.setdefault((parent, int(token)), node)
        if hidden is not None:
            self._hidden.append(hidden)

    def hidden(self) -> Tensor:
        return torch.cat(self._hidden)

    def find(self, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, int]:
        """Map the nodes of a tree to partial nodes that have the same tokens since the prefix; others are left out."""
        nodes = NodeMap.by_tokens(tokens, parents, self._places, num_targets=self.nodes.num_tentative)
        return {node: partial for node, partial in enumerate(nodes.targets) if partial is not None}
