"""Memory of slots: preallocated keys and values, compacted in place.

All layers of one shape share one tensor of shape (slots, layers, kv_heads, length, head_dim): committing a path takes
two copies for the whole model, and a new slot touches no memory of others. A token's keys depend on its depth, not on
its index, so a tentative node can be moved to its committed position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftree.core.host import single_threaded
from draftree.core.node_map import NodeMap
from draftree.core.tensors import to_device
from draftree.core.tree import ROOT
from draftree.models.base import Slot

if TYPE_CHECKING:
    from draftree.models.kv.partial import PartialTree

SPARE = 8
"""Factor of slots reserved in host memory over slots requested."""
CLOSED = -1
"""Index of a closed slot."""


class KVSlot(Slot):
    """Bookkeeping of a slot. Mutated by its model only."""

    __slots__ = ("_length", "depths", "index", "offset", "parents", "partial")

    def __init__(self, index: int) -> None:
        self.index = index
        self._length = 0
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.partial: PartialTree | None = None
        self.offset = 0
        """Position minus index of a token; not zero after images, which may take fewer positions than tokens."""

    @property
    def id(self) -> int:
        """Index of the slot."""
        return self.index

    @property
    def length(self) -> int:
        """Number of tokens in the committed prefix."""
        return self._length

    @property
    def num_tentative(self) -> int:
        """Number of tokens in the tentative tree."""
        return len(self.parents)

    def append(self, parents: Sequence[int]) -> None:
        """Append tentative nodes."""
        for parent in parents:
            assert ROOT <= parent < len(self.parents), "a parent must be an earlier tentative node"
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
            self.parents.append(parent)

    def commit(self, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Append a path, stored first, to the prefix; the nodes to keep, stored next, become the tentative tree."""
        self._length += len(path)
        self.partial = None
        if not keep:
            self.parents.clear()
            self.depths.clear()
            return
        root = path[-1] if path else ROOT
        self.parents = NodeMap.keeping(self.parents, keep, root=root).derived_parents
        self.depths = [self.depths[node] - len(path) for node in keep]

    def truncate(self, length: int) -> None:
        """Keep only the first `length` tokens of the prefix; drop the tree."""
        assert 0 <= length <= self._length, "a prefix is cut, not lengthened"
        self._length = length
        self.commit(())

    def copy_prefix(self, length: int) -> None:
        """Set the prefix length after a copy of another slot's prefix."""
        self._length = length


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's keys and values for one token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVMemory:
    """Keys and values of all layers and slots. Mutated by passes and commits.

    Args:
        shapes: shape of each attention layer by layer index.
        dtype: dtype of keys and values.
        device: device of keys and values.
        granule: lengths are rounded up to a multiple of it.
        num_scratch: positions after the end of each slot for values that are never read.
    """

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        granule: int = 1,
        num_scratch: int = 0,
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._granule = granule
        self.num_scratch = num_scratch
        self.version = 0
        """Token that changes whenever the memory is reallocated."""
        self.num_slots = 0
        self.length = 0
        self._stores: list[tuple[Tensor, Tensor]] = []
        self._num_held = 0
        """Number of slots that fit into the memory."""
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all slots in bytes."""
        return self.num_slots * (self.length + self.num_scratch) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Size of one token in one slot in bytes."""
        values = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in self._shapes.values())
        return values * self._dtype.itemsize

    def clear(self) -> None:
        """Free all memory."""
        self.num_slots = self.length = self._num_held = 0
        self.version += 1
        self._stores = []
        self.keys, self.values = {}, {}

    def reserve(self, num_slots: int, length: int, *, used: Mapping[int, int]) -> None:
        """Make room for slots and tokens.

        Args:
            num_slots: number of slots.
            length: tokens per slot.
            used: number of stored tokens by slot; these are kept, all others are lost.
        """
        length = -(-length // self._granule) * self._granule
        if (num_slots, length) == (self.num_slots, self.length):
            return
        if length != self.length or num_slots > self._num_held:
            self._exchange(num_slots, length, used)
        self.version += 1
        self.num_slots, self.length = num_slots, length
        for (keys, values), layers in zip(self._stores, self._layers_by_shape().values(), strict=True):
            for place, layer in enumerate(layers):
                self.keys[layer], self.values[layer] = keys[:num_slots, place], values[:num_slots, place]

    def _exchange(self, num_slots: int, length: int, used: Mapping[int, int]) -> None:
        """Reallocate, and copy the used tokens."""
        # untouched host memory costs nothing: slots that are added later fit without a copy
        held = num_slots * SPARE if self._device.type == "cpu" else num_slots
        try:
            stores = self._stores_of(held, length)
        except MemoryError:  # on a system that counts untouched memory as well
            held, stores = num_slots, self._stores_of(num_slots, length)
        for slot, count in used.items():
            for old_pair, pair in zip(self._stores, stores, strict=True):
                for old, new in zip(old_pair, pair, strict=True):
                    new[slot, :, :, :count] = old[slot, :, :, :count]
        self._stores, self._num_held = stores, held

    def _stores_of(self, num_slots: int, length: int) -> list[tuple[Tensor, Tensor]]:
        stores = []
        for shape, layers in self._layers_by_shape().items():
            first = (num_slots, len(layers), shape.kv_heads, length + self.num_scratch)
            stores.append((self._zeros((*first, shape.key_dim)), self._zeros((*first, shape.value_dim))))
        return stores

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self._device.type != "cpu" or 0 in shape:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # numpy gets zeroed pages from the system, which cost nothing until they are written
        size = int(np.prod(shape)) * self._dtype.itemsize
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(self._dtype).view(shape)

    def _layers_by_shape(self) -> dict[LayerShape, list[int]]:
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in sorted(self._shapes.items()):
            groups.setdefault(shape, []).append(layer)
        return groups

    @torch.inference_mode()
    def rearrange(self, moves: Sequence[tuple[int, int, int]], dropped: Sequence[tuple[int, int]]) -> None:
        """Move tokens of many slots at once, and write zeros over dropped tokens; the host does not wait.

        Args:
            moves: slot, source and target position; all sources are read before any target is written.
            dropped: slot and position. Masked positions are read as well, and zero times NaN is NaN: values of dropped
                nodes must be finite.
        """
        if not (moves or dropped):
            return
        numbers = to_device(
            [*(n for move in moves for n in move), *(n for pair in dropped for n in pair)], self._device
        )
        slot, source, target = numbers[: 3 * len(moves)].view(-1, 3).unbind(1)
        empty_slot, empty_place = numbers[3 * len(moves) :].view(-1, 2).unbind(1)
        for pair in self._stores:
            for store in pair:
                if moves:
                    store[slot, :, :, target] = store[slot, :, :, source]
                if dropped:
                    store[empty_slot, :, :, empty_place] = 0

    @torch.inference_mode()
    def wipe(self, slot: int) -> None:
        """Fill a slot with zeros."""
        for pair in self._stores:
            for store in pair:
                store[slot].zero_()

    def gather(self, slot: int, *, start: int, offsets: Sequence[int]) -> None:
        """Move the tokens at start + offsets to start, start + 1, …; all sources are read first."""
        if list(offsets) != list(range(len(offsets))):
            with single_threaded():
                self._gather(slot, start, [start + offset for offset in offsets])

    @torch.inference_mode()
    def _gather(self, slot: int, start: int, places: Sequence[int]) -> None:
        source = to_device(places, self._device)
        for pair in self._stores:
            for store in pair:
                view = store[slot]
                view[:, :, start : start + len(places)] = view.index_select(2, source)

    @torch.inference_mode()
    def move(self, slot: KVSlot, sources: Sequence[int], targets: Sequence[int], *, layers: Iterable[int]) -> None:
        """Move tentative tokens to other positions in some layers only; all sources are read first."""
        if list(sources) == list(targets):
            return
        to, came_from = (torch.tensor(nodes, device=self._device) + slot.length for nodes in (targets, sources))
        for layer in layers:
            for store in (self.keys[layer][slot.index], self.values[layer][slot.index]):
                store[:, to] = store[:, came_from]

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another."""
        for pair in self._stores:
            for store in pair:
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
        # a value that is not finite in one layer is not finite in any later layer
        last = max(self._shapes, default=None)
        if last is None or bool(self.values[last][slot].sum(dtype=torch.float32).isfinite()):
            return
        for pair in self._stores:
            for store in pair:
                store[slot] = 0
