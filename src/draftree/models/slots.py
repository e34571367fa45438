"""Slots of a model that runs here: preallocated keys and values, compacted in place.

All layers of one shape share one tensor of shape (layers, slots, kv_heads, length, head_dim), so that keeping
an accepted path is two copies for the whole model. A token's keys depend on its depth, not on its index, so a
tentative node can be moved to the place where it is committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftree.core.transfer import to_device
from draftree.core.tree import ROOT
from draftree.models.base import Slot

if TYPE_CHECKING:
    from draftree.models.sketch import Sketch

CLOSED = -1
"""Index of a slot that was given back."""


class KVSlot(Slot):
    """A slot's bookkeeping. Mutated by its model only."""

    __slots__ = ("_length", "depths", "index", "parents", "sketch")

    def __init__(self, index: int) -> None:
        self.index = index
        self._length = 0
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.sketch: Sketch | None = None

    @property
    def length(self) -> int:
        """Tokens in the committed prefix."""
        return self._length

    @property
    def num_tentative(self) -> int:
        """Tokens in the tentative tree."""
        return len(self.parents)

    def append(self, parents: Sequence[int]) -> None:
        """Note new tentative nodes."""
        for parent in parents:
            assert ROOT <= parent < len(self.parents), "a parent must be an earlier tentative node"
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
            self.parents.append(parent)

    def commit(self, count: int) -> None:
        """The first `count` stored tentative tokens are prefix now; the rest is forgotten."""
        self._length += count
        self.sketch = None
        self.parents.clear()
        self.depths.clear()

    def keep(self, nodes: Sequence[int]) -> None:
        """Renumber the tentative tree to these nodes."""
        place = {node: new for new, node in enumerate(nodes)} | {ROOT: ROOT}
        self.parents, self.depths = [place[self.parents[n]] for n in nodes], [self.depths[n] for n in nodes]

    def truncate(self, length: int) -> None:
        """The first `length` stored tokens are the prefix now; the rest and the tree are forgotten."""
        assert 0 <= length <= self._length, "a prefix is cut, not lengthened"
        self._length = length
        self.commit(0)

    def copy_prefix(self, length: int) -> None:
        """As many tokens of another slot's prefix were copied here."""
        self._length = length


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's keys and values, for one token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVMemory:
    """Keys and values of all layers and slots. Mutated by passes and commits.

    Args:
        shapes: one a layer that attends, by the layer's index.
        dtype: of keys and values.
        device: where they lie.
        granule: lengths are rounded up to a multiple of it.
        num_scratch: places behind each slot's, for what nobody reads.
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
        """Another one whenever the memory lies elsewhere."""
        self.num_slots = 0
        self.length = 0
        self._stores: list[tuple[Tensor, Tensor]] = []
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for pair in self._stores for t in pair)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one slot."""
        values = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in self._shapes.values())
        return values * self._dtype.itemsize

    def clear(self) -> None:
        """Give all memory back."""
        self.num_slots = self.length = 0
        self.version += 1
        self._stores = []
        self.keys, self.values = {}, {}

    def reserve(self, num_slots: int, length: int, *, used: Mapping[int, int]) -> None:
        """Make room for so many slots and tokens.

        Args:
            num_slots: slots from now on.
            length: tokens of each.
            used: how many tokens are stored in which slots; they stay, whatever else was stored is gone.
        """
        length = -(-length // self._granule) * self._granule
        if (num_slots, length) == (self.num_slots, self.length):
            return
        self.version += 1
        places = length + self.num_scratch
        old_stores, self._stores = self._stores, []
        for position, (shape, layers) in enumerate(self._layers_by_shape().items()):
            pair = []
            for side, dim in enumerate((shape.key_dim, shape.value_dim)):
                store = self._zeros((len(layers), num_slots, shape.kv_heads, places, dim))
                for slot, count in used.items():
                    store[:, slot, :, :count] = old_stores[position][side][:, slot, :, :count]
                pair.append(store)
            self._stores.append((pair[0], pair[1]))
            for place, layer in enumerate(layers):
                self.keys[layer], self.values[layer] = pair[0][place], pair[1][place]
        self.num_slots, self.length = num_slots, length

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # numpy asks the system for zeros, which costs nothing until they are written over
        size = int(np.prod(shape)) * self._dtype.itemsize
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(self._dtype).view(shape)

    def _layers_by_shape(self) -> dict[LayerShape, list[int]]:
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in sorted(self._shapes.items()):
            groups.setdefault(shape, []).append(layer)
        return groups

    def rearrange(self, moves: Sequence[tuple[int, int, int]], dropped: Sequence[tuple[int, int]]) -> None:
        """Move tokens of many slots at once, and put zeros where tokens were dropped; the host does not wait.

        Args:
            moves: slot, place, and the place it goes to; all are read before any is written.
            dropped: slot and place. Masked places are read as well, and zero times NaN is NaN: what a node that nobody
                kept left behind must be finite.
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
                    store[:, slot, :, target] = store[:, slot, :, source]
                if dropped:
                    store[:, empty_slot, :, empty_place] = 0

    def wipe(self, slot: int) -> None:
        """Put zeros into a slot."""
        for pair in self._stores:
            for store in pair:
                store[:, slot].zero_()

    def gather(self, slot: int, *, start: int, offsets: Sequence[int]) -> None:
        """Move the tokens at start + offsets to start, start + 1, …; offsets ascend."""
        if list(offsets) == list(range(len(offsets))):
            return
        source = to_device([start + offset for offset in offsets], self._device)
        for pair in self._stores:
            for store in pair:
                view = store[:, slot]
                view[:, :, start : start + len(offsets)] = view.index_select(2, source)

    def move(self, slot: KVSlot, sources: Sequence[int], targets: Sequence[int], *, layers: Iterable[int]) -> None:
        """Give tentative tokens the places of others, in some layers only; what is there already is read before."""
        if list(sources) == list(targets):
            return
        to, came_from = (torch.tensor(nodes, device=self._device) + slot.length for nodes in (targets, sources))
        for layer in layers:
            for store in (self.keys[layer][slot.index], self.values[layer][slot.index]):
                store[:, to] = store[:, came_from]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another."""
        for pair in self._stores:
            for store in pair:
                store[:, target, :, :length] = store[:, source, :, :length]

    def scrub(self, slot: int) -> None:
        """Zero a slot if it holds what is not finite: a masked key counts 0 times, and 0 times NaN is NaN."""
        # what is not finite in one layer is not finite in all layers above it
        last = max(self._shapes, default=None)
        if last is None or bool(self.values[last][slot].sum(dtype=torch.float32).isfinite()):
            return
        for pair in self._stores:
            for store in pair:
                store[:, slot] = 0
